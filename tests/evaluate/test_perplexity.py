"""Test the loss of texts under a language model, on a tiny LM."""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.evaluate import perplexity
from foretrace.evaluate.continuations import encode_with_bos
from foretrace.evaluate.perplexity import token_nll
from tiny_lm import tiny_model, word_tokenizer


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
