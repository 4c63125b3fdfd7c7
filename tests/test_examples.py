"""The HMMs in `examples/` are small and complete, and belong to the LM that they name."""

from pathlib import Path

import pytest
import torch

from foretrace import HMM, fingerprint

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2-135m"
CHAT_EXAMPLE = EXAMPLE.with_name("smollm2-135m-chat")


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.from_pretrained(EXAMPLE)


def test_it_is_small_and_records_how_it_was_made(hmm: HMM) -> None:
    assert sum(path.stat().st_size for path in EXAMPLE.iterdir()) <= 12e6
    assert (hmm.num_states, hmm.vocab_size) == (1024, 49_152)
    assert hmm.config.eos_token_ids == (0,)
    facts = hmm.config.distillation
    assert facts["settings"]["sequences"] >= 100_000
    assert facts["held_out_log_likelihood"] > facts["bigram_log_likelihood"] + 0.1
    assert "SmolLM2-135M-Instruct" in (EXAMPLE / "README.md").read_text("utf-8")


def test_the_hmm_for_chats_is_adapted_from_it(hmm: HMM) -> None:
    chat = HMM.from_pretrained(CHAT_EXAMPLE)
    assert sum(path.stat().st_size for path in CHAT_EXAMPLE.iterdir()) <= 6e6
    assert chat.config.eos_token_ids == (2, 0)
    assert chat.config.tokenizer_fingerprint == hmm.config.tokenizer_fingerprint
    facts = chat.config.distillation
    assert facts["chat"]
    assert facts["start"] == hmm.config.distillation
    assert facts["held_out_log_likelihood"] > facts["bigram_log_likelihood"] + 0.5


def test_its_samples_are_likelier_than_shuffled_ones(hmm: HMM) -> None:
    texts = hmm.sample(64, 32, seed=0)
    shuffled = texts[:, torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    unended = (texts != 0).all(1)
    sampled = hmm.log_likelihood(texts[unended]).mean()
    assert sampled > hmm.log_likelihood(shuffled[unended]).mean() + 10


@pytest.mark.slow
def test_text_is_likelier_forward_than_backward(hmm: HMM, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert hmm.config.tokenizer_fingerprint == fingerprint(tokenizer.get_vocab())
    words = "The weather in the north of the country was cold, and the people of the town were not"
    ids = torch.tensor(tokenizer([words], add_special_tokens=False).input_ids)
    backward = ids.flip(1)
    assert hmm.log_likelihood(ids) > hmm.log_likelihood(backward) + 10
