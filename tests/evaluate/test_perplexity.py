"""Test the loss of texts under a language model, on a tiny LM."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.evaluate import perplexity
from foretrace.evaluate.continuations import (
    ContinuationGenerator,
    Method,
    Sampling,
    encode_with_bos,
)
from foretrace.evaluate.perplexity import token_nll
from tiny_lm import byte_tokenizer, tiny_model, word_tokenizer


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny_model(word_tokenizer())


def test_token_nll_is_of_the_continuation_alone(lm: Any) -> None:
    """The loss does not depend on padding or the batch; a blank continuation has none."""
    tokenizer = word_tokenizer()
    prompts, texts = ["w1 w2 w3", "w4"], [[" w5 w6", ""], [" w7"]]
    encode = partial(encode_with_bos, tokenizer, bos_token_id=0)
    losses = token_nll(lm, encode, prompts, texts)
    ids = torch.tensor([[0, *tokenizer("w1 w2 w3 w5 w6").input_ids]])
    with torch.inference_mode():
        nats = -lm(ids).logits[0].log_softmax(-1)
    expected = [float(nats[3, ids[0, 4]]), float(nats[4, ids[0, 5]])]
    assert losses[0][0] == pytest.approx(expected, abs=1e-4)
    assert losses[0][1] == []
    alone = token_nll(lm, encode, ["w4"], [[" w7"]])
    assert losses[1][0] == pytest.approx(alone[0][0])


def test_batches_do_not_change_losses(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches hold all rows that fit, and at least one; every text is in one batch."""
    encode = partial(encode_with_bos, word_tokenizer(), bos_token_id=0)
    prompts, texts = ["w1", "w2 w3"], [[" w5" * 7, " w6"], [" w7 w8", "", " w9" * 3]]
    losses = token_nll(lm, encode, prompts, texts)
    batches = []
    monkeypatch.setattr(perplexity, "MAX_TOKENS", 6)
    small = token_nll(
        lm, encode, prompts, texts, on_progress=lambda done, total: batches.append((done, total))
    )
    assert batches == [(1, 5), (4, 5), (5, 5)]
    for rows, small_rows in zip(losses, small, strict=True):
        for row, small_row in zip(rows, small_rows, strict=True):
            assert row == pytest.approx(small_row, abs=1e-4)


def test_losses_are_known_where_the_text_is_encoded_as_it_was_generated(tmp_path: Path) -> None:
    """A random LM writes tokens that its tokenizer often encodes as others."""
    prompts = ["the cat", "a dog sat on the mat"]
    tokenizer = byte_tokenizer(prompts, size=280)
    model = tiny_model(tokenizer)
    sampling = Sampling(continuations=40, max_new_tokens=4, top_p=0.9)
    ends = range(0, len(tokenizer), 4)  # many texts end early; the special token is not in a text
    generator = ContinuationGenerator(model, tokenizer, sampling, list(ends), bos_token_id=0)
    generations = generator.generate(prompts, Method("bare"), tmp_path / "bare.jsonl", {})
    texts = [generation.texts for generation in generations]
    known = [generation.bare_nats for generation in generations]
    scored = token_nll(model, generator.encode, prompts, texts)
    pairs = [
        (losses, text_scored)
        for row, row_scored in zip(known, scored, strict=True)
        for losses, text_scored in zip(row, row_scored, strict=True)
    ]
    same = [(losses, text_scored) for losses, text_scored in pairs if losses is not None]
    assert 10 < len(same) < len(pairs) - 10
    assert len({len(losses) for losses, _ in same}) > 2
    for losses, text_scored in same:
        assert losses == pytest.approx(text_scored, abs=1e-4)

    # The model reads the other texts alone, and the result is the same.
    done = []
    merged = token_nll(
        model,
        generator.encode,
        prompts,
        texts,
        known=known,
        on_progress=lambda _, total: done.append(total),
    )
    assert set(done) == {len(pairs) - len(same)}
    for row, row_scored in zip(merged, scored, strict=True):
        for losses, text_scored in zip(row, row_scored, strict=True):
            assert losses == pytest.approx(text_scored, abs=1e-4)
