"""Hidden states before tokens: the ones that the LM's head reads, kept over interruptions."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import PreTrainedModel

from foretrace.engines.transformers import hidden_states
from foretrace.engines.transformers.hidden_states import encode_texts
from foretrace.engines.transformers.token_states import StoredStates, read_states, sample_states
from tiny_lm import WORDS, word_tokenizer

TOKENIZER = word_tokenizer()
TEXTS = [" ".join(WORDS[1 + number : 3 + number * 2]) for number in range(12)]


def expected(model: PreTrainedModel, before: list[int], tokens: list[int]) -> Tensor:
    """Log-probabilities of tokens after others."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([[*before, *tokens]])).logits[0]
    return logits[len(before) - 1 : -1].log_softmax(-1)


def check(model: PreTrainedModel, stored: StoredStates, text: int, before: list[int]) -> None:
    """The states of a text make the logits that predict its tokens."""
    here = stored.texts == text
    states = torch.cat(stored.shards)[here].float()
    logits = model.get_output_embeddings()(states).detach()
    wanted = expected(model, before, stored.tokens[here].tolist())
    torch.testing.assert_close(logits.log_softmax(-1), wanted, atol=0.02, rtol=0)


def test_states_predict_the_tokens_of_texts(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "BATCH_TOKENS", 40)
    rows = encode_texts(TOKENIZER, TEXTS)
    stored = read_states(model, TOKENIZER, rows, tmp_path / "states")
    assert len(stored.shards) > 3
    assert stored.rows(len(rows)) == rows
    for text in range(len(rows)):
        check(model, stored, text, [0])
    few = read_states(model, TOKENIZER, rows, tmp_path / "few", max_states=20)
    assert 0 < len(few.tokens) <= 20


def test_sampled_states_predict_the_samples(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = TOKENIZER("w1 w2").input_ids
    stored = sample_states(model, TOKENIZER, [prompt], [0], tmp_path, max_states=2_000)
    assert len(stored.shards) == 2
    assert 0 not in stored.tokens
    rows = stored.rows(128)
    assert len({tuple(row) for row in rows}) > 100
    for text in (0, 70):
        check(model, stored, text, prompt)


@pytest.mark.parametrize("samples", [False, True])
def test_an_interrupted_run_continues(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    monkeypatch.setattr(hidden_states, "BATCH_TOKENS", 40)
    rows = encode_texts(TOKENIZER, TEXTS)

    def run(folder: Path, stop: int | None = None, seed: int = 0) -> StoredStates:
        def on_progress(done: int, total: int) -> None:
            if stop is not None and done >= stop:
                raise KeyboardInterrupt

        if samples:
            return sample_states(
                model, TOKENIZER, [], [0], folder, max_states=2_000, seed=seed,
                on_progress=on_progress,
            )  # fmt: skip
        texts = rows[seed:]
        return read_states(model, TOKENIZER, texts, folder, on_progress=on_progress)

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part", stop=10)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "part").iterdir()}
    assert files
    again = run(tmp_path / "part")
    assert all(file.stat().st_mtime_ns == time for file, time in files.items())
    assert torch.equal(again.tokens, whole.tokens)
    assert torch.equal(torch.cat(again.shards), torch.cat(whole.shards))
    other = run(tmp_path / "part", seed=1)
    assert len(other.tokens) != len(whole.tokens) or not torch.equal(other.tokens, whole.tokens)
