"""Rows predict what a full pass over each sequence predicts."""

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from foretrace.engines.transformers.batch import LMBatch
from tiny_lm import tiny_model, word_tokenizer

PROMPTS = [[5, 6, 7], [9]]


@pytest.fixture(scope="module")
def lm() -> Any:
    model = tiny_model(word_tokenizer())
    model.train(False)
    return model


@torch.inference_mode()
def predict(lm: Any, sequences: list[list[int]]) -> torch.Tensor:
    """Return the logits of the next token of each sequence by a pass over all its tokens."""
    return torch.stack([lm(torch.tensor([ids])).logits[0, -1] for ids in sequences])


def test_rows_predict_what_a_full_pass_predicts(lm: Any) -> None:
    rows = LMBatch(lm, PROMPTS, copies=2)
    sequences = [list(prompt) for prompt in PROMPTS for _ in range(2)]
    for step in range(4):
        torch.testing.assert_close(rows.logits, predict(lm, sequences), rtol=1e-4, atol=1e-4)
        tokens = [1 + step, 2, 3, 4]
        rows.append(torch.tensor(tokens))
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)


def test_a_copy_shares_the_model_and_nothing_that_grows(lm: Any) -> None:
    rows = LMBatch(lm, PROMPTS)
    before, copied = rows.logits.clone(), deepcopy(rows)
    copied.append(torch.tensor([1, 2]))
    assert copied.model is rows.model
    assert rows.mask.shape == (2, 3)
    assert torch.equal(rows.logits, before)
    rows.append(torch.tensor([1, 2]))
    assert torch.equal(rows.logits, copied.logits)
