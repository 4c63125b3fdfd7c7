"""Distill a small HMM from a real LM."""

from pathlib import Path

import pytest
import torch

import foretrace as ft
from foretrace.distill import EMConfig, LatentConfig, LMConfig
from foretrace.distill.sampling.transformers_source import TransformersSource

pytest.importorskip("faiss", reason="needs the extra `transformers`")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(smollm2: Path) -> TransformersSource:
    return TransformersSource.load(str(smollm2), end_of_text_token="<|endoftext|>", dtype="auto")


def test_hidden_states_predict_the_next_token(source: TransformersSource) -> None:
    """The LM's head maps the state at t to the LM's distribution of token t."""
    rows = torch.tensor(source.encode(["The capital of France is Paris, and the"])[0])[None]
    hidden = source.hidden(rows)
    assert hidden.shape == (1, rows.shape[1] + 1, 576)
    input_ids = torch.cat([torch.tensor([[source.eos_token_id]]), rows], 1)
    with torch.inference_mode():
        expected = source.model(input_ids).logits
        ours = source.model.lm_head(hidden)
    assert torch.allclose(ours.float(), expected.float(), atol=1e-3)


def test_distilling_a_real_lm(smollm2: Path, tmp_path: Path) -> None:
    config = ft.DistillConfig(
        num_states=32,
        sequences=384,
        length=16,
        latent=LatentConfig(iterations=5),
        em=EMConfig(epochs=10, batch_size=128, held_out=64),
    )
    hmm = ft.distill(
        str(smollm2),
        config,
        out=tmp_path,
        prompts=["The weather today", "I told him that"],
        lm=LMConfig(end_of_text="<|endoftext|>"),
    )
    facts = hmm.config.distillation
    assert hmm.vocab_size == 49_152
    assert hmm.config.eos_token_ids == (0,)
    assert facts["held_out_log_likelihood"] > facts["unigram_log_likelihood"]
    assert set(facts["memory_gain"]) == {"1", "2", "4"}
