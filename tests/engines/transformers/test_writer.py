"""Test the texts that a language model writes."""

from pathlib import Path

import pytest
import torch

from foretrace.chat import as_messages
from tiny_lm import chat_tokenizer, tiny_model, word_tokenizer

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.engines.contrast import write_contrast
from foretrace.engines.transformers.writer import LMWriter


def test_texts_depend_on_the_seed_alone() -> None:
    tokenizer = chat_tokenizer()
    writer = LMWriter(tiny_model(tokenizer), tokenizer, "tiny")
    chats = [as_messages("w1")] * 2 + [as_messages("w2")] * 2
    texts = writer.write(chats, None, seed=1)
    assert texts == writer.write(chats, None, seed=1)
    assert texts != writer.write(chats, None, seed=2)
    assert len({text for text, _ in texts}) == 4
    assert len(writer.write([*chats, "w3"], None, seed=1)) == 5  # unequal numbers of copies


def test_a_chat_is_plain_text_without_a_chat_template() -> None:
    tokenizer = word_tokenizer()
    model = tiny_model(tokenizer)
    chat = LMWriter(model, tokenizer, "tiny").write([as_messages("w1 w2")], None, seed=0)
    assert chat[0].text
    ended = LMWriter(model, tokenizer, "tiny", ends=range(1, 64)).write(["w1"], None, seed=0)
    assert ended[0].finished


def test_guided_texts_fit_their_prompt_better_than_its_opposite() -> None:
    tokenizer = chat_tokenizer()
    model = tiny_model(tokenizer)
    writer = LMWriter(model, tokenizer, "tiny")
    prompt, opposite = "w1 w2 w3", "w40 w41 w42"

    def nats(before: str, text: str) -> float:
        ids = torch.tensor([tokenizer(f"{before} {text}").input_ids])
        with torch.inference_mode():
            log_p = model(ids).logits[0, :-1].log_softmax(-1)
        return float(log_p.gather(1, ids[0, 1:, None])[2:].mean())  # after three words

    def margin(opposites: list[str] | None) -> float:
        texts = writer.write([prompt] * 16, opposites, seed=0)
        return sum(nats(prompt, text) - nats(opposite, text) for text, _ in texts)

    assert margin([opposite] * 16) > margin(None)


@pytest.mark.slow
def test_a_real_lm_writes_both_sides(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    writer = LMWriter(AutoModelForCausalLM.from_pretrained(smollm2), tokenizer, "smollm2")
    sides = ("very positive, enthusiastic", "very negative, disappointed")
    contrast = write_contrast(writer, *sides, tmp_path / "w.jsonl", num_texts=10)
    assert len(contrast.texts) >= 6
    assert {text.side for text in contrast.texts} == {"for", "against"}
