"""Sampling with vLLM: the LM's distribution, and an independent stream for each shard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from foretrace.chat import as_messages
from foretrace.distill import DistillConfig, EMConfig, LatentConfig, LMConfig
from foretrace.distill.run import distill
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.distill.sampling.vllm_source import VLLMSource
from smollm2 import has_fast_bfloat16

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM emits many

OPTIONS: dict[str, Any] = {
    "max_model_len": 32,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 512,  # fewer than the prompts of a test have together
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def source(smollm2: Path) -> Iterator[VLLMSource]:
    loaded = VLLMSource.load(
        str(smollm2), end_of_text_token="<|endoftext|>", dtype="float32", **OPTIONS
    )
    yield loaded
    loaded.close()


def test_first_tokens_follow_the_distribution_of_the_lm(source: VLLMSource, smollm2: Path) -> None:
    """They follow the distribution of transformers: no top-k, top-p or penalty applies.

    In bfloat16 the two engines round differently, so this runs in float32.
    """
    lm = TransformersSource.load(str(smollm2), end_of_text_token="<|endoftext|>", dtype="float32")
    with torch.inference_mode():
        expected = torch.softmax(lm.model(torch.tensor([[0]])).logits[0, -1].double(), -1)
    drawn = source.draw([[]] * 3000, 1, seed=0)[:, 0]
    observed = torch.bincount(drawn, minlength=len(expected)).double()
    frequent = expected * 3000 >= 8
    assert (observed[~frequent].sum() / 3000 - expected[~frequent].sum()).abs() < 0.04
    counts = torch.cat([observed[frequent], observed[~frequent].sum()[None]])
    wanted = torch.cat([expected[frequent], expected[~frequent].sum()[None]]) * 3000
    assert chisquare(counts, wanted / wanted.sum() * 3000).pvalue > 1e-4


def test_rows_depend_on_the_seed(source: VLLMSource) -> None:
    """A seed gives the same rows again; rows and seeds differ from one another."""
    once, again, other = (source.draw([[]] * 32, 6, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(once, again)
    assert not (once[:, None] == other[None]).all(-1).any()
    assert len(torch.unique(once, dim=0)) == 32


def test_prefixes_are_kept_and_rows_are_padded(source: VLLMSource) -> None:
    prefix = source.encode(["The capital of France is"])[0]
    assert 100 * len(prefix) > OPTIONS["max_num_batched_tokens"] - 100
    rows = source.draw([prefix, []] * 100, 12, seed=1)
    assert (rows[::2, : len(prefix)] == torch.tensor(prefix)).all()
    ended = (rows == 0).cumsum(1) > 0
    assert (rows[ended] == 0).all()


def test_distillation_with_vllm(smollm2: Path, tmp_path: Path) -> None:
    config = DistillConfig(
        num_states=16,
        sequences=256,
        length=16,
        latent=LatentConfig(iterations=3),
        em=EMConfig(epochs=5, batch_size=64, held_out=64),
    )
    options = {**OPTIONS, "max_model_len": 17}
    dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    lm = LMConfig(engine="vllm", dtype=dtype, end_of_text="<|endoftext|>", options=options)
    hmm = distill(str(smollm2), config, out=tmp_path, lm=lm)
    facts = hmm.config.distillation
    assert facts["held_out_log_likelihood"] > facts["unigram_log_likelihood"]


def test_answers_in_chats(smollm2: Path) -> None:
    """A row begins after the last end of a turn, and any end is stored as the end of a turn."""
    options = {**OPTIONS, "max_model_len": 128}
    source = VLLMSource.load(
        str(smollm2), end_of_text_token="<|endoftext|>", chat=True, dtype="float32", **options
    )
    assert source.ends == (2, 0)
    (ids,) = source.encode([as_messages("Say yes or no.")])
    rows = source.draw([ids[-3:]] * 50, 24, seed=0, contexts=[ids[:-3]] * 50)
    source.close()
    assert (rows[:, :3] == torch.tensor(ids[-3:])).all()
    ended = (rows == 2).cumsum(1) > 0
    assert ended[:, -1].any()
    assert (rows[ended] == 2).all()
    assert not (rows == 0).any()
