"""Sampling with llama.cpp: the LM's distribution, and the hidden states of transformers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("llama_cpp", reason="needs the extra `llama-cpp`")

from foretrace.chat import as_messages
from foretrace.distill import DistillConfig, EMConfig, LatentConfig, LMConfig
from foretrace.distill.run import distill
from foretrace.distill.sampling.llama_source import LlamaSource, Position
from foretrace.distill.sampling.sample import SamplingConfig, sample
from foretrace.errors import InvalidInputError

pytestmark = pytest.mark.llama_cpp

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def source(smollm2_gguf: Path) -> Iterator[LlamaSource]:
    loaded = LlamaSource.load(str(smollm2_gguf), 16, end_of_text_token=END)
    yield loaded
    loaded.close()


def test_the_first_tokens_follow_the_distribution_of_the_lm(source: LlamaSource) -> None:
    source._clear()
    logits = source._compute([Position(0, 0, 0, True)])[0]
    expected = logits.double().softmax(-1)
    drawn = source.draw([[]] * 640, 1, seed=0)[:, 0]
    observed = torch.bincount(drawn, minlength=len(expected)).double()
    frequent = expected * 640 >= 8
    counts = torch.cat([observed[frequent], observed[~frequent].sum()[None]])
    wanted = torch.cat([expected[frequent], expected[~frequent].sum()[None]]) * 640
    assert chisquare(counts, wanted / wanted.sum() * 640).pvalue > 1e-4


def test_a_batch_of_sequences_equals_each_alone(source: LlamaSource) -> None:
    """Logits of sequences of unlike length, side by side; quantised products round differently."""
    sequences = [[0, 504, 550], [0, 9375], [0, 1640, 338, 392, 436]]
    together = [
        Position(row, index, token, index == len(tokens) - 1)
        for row, tokens in enumerate(sequences)
        for index, token in enumerate(tokens)
    ]
    source._clear()
    logits = source._compute(together)
    for row, tokens in enumerate(sequences):
        source._clear()
        alone = [Position(0, i, token, i == len(tokens) - 1) for i, token in enumerate(tokens)]
        expected = source._compute(alone)[0]
        assert np.corrcoef(logits[row], expected)[0, 1] > 0.999
        assert int(logits[row].argmax()) == int(expected.argmax())


def test_rows_depend_on_the_seed_and_keep_their_prefixes(source: LlamaSource) -> None:
    prefix = source.encode(["The capital of France is"])[0]
    prefixes = [prefix, []] * 8
    once, again, other = (source.draw(prefixes, 10, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert (once[::2, : len(prefix)] == torch.tensor(prefix)).all()
    ended = (once == 0).cumsum(1) > 0
    assert (once[ended] == 0).all()


def test_hidden_states_are_those_of_transformers(source: LlamaSource, smollm2: Path) -> None:
    from foretrace.distill.sampling.transformers_source import TransformersSource

    reader = TransformersSource.load(str(smollm2), end_of_text_token=END, dtype="float32")
    rows = source.draw([[]] * 3, 8, seed=0)
    contexts = [[0], [0, 504], [0, 550, 9375]]
    hidden, expected = source.hidden(rows, contexts), reader.hidden(rows, contexts)
    assert hidden.shape == expected.shape == (3, 9, 576)
    assert torch.cosine_similarity(hidden, expected.float(), dim=-1).min() > 0.95
    assert reader.tokenizer_fingerprint == source.tokenizer_fingerprint


def test_a_missing_shard_is_sampled_again(source: LlamaSource, tmp_path: Path) -> None:
    config = SamplingConfig(sequences=16, length=8, shard_rows=8)
    path = sample(tmp_path, source, config).shard_path(1)
    content = path.read_bytes()
    path.unlink()
    sample(tmp_path, source, config)
    assert path.read_bytes() == content


def test_an_hmm_is_distilled(smollm2_gguf: Path, tmp_path: Path) -> None:
    config = DistillConfig(
        num_states=8,
        sequences=64,
        length=8,
        latent=LatentConfig(iterations=2),
        em=EMConfig(epochs=1, batch_size=32, held_out=16),
    )
    hmm = distill(str(smollm2_gguf), config, out=tmp_path, lm=LMConfig(end_of_text=END))
    assert hmm.config.source_model == smollm2_gguf.name
    assert hmm.config.eos_token_ids == (0,)


def test_answers_in_chats_end_with_their_turns(smollm2_gguf: Path) -> None:
    source = LlamaSource.load(str(smollm2_gguf), 8, chat=True)
    assert source.ends[0] == 2
    (prompt,) = source.encode([as_messages("Say yes.")])
    rows = source.draw([prompt[-2:]] * 4, 8, 0, [prompt[:-2]] * 4)
    assert (rows[:, :2] == torch.tensor(prompt[-2:])).all()
    with pytest.raises(InvalidInputError, match="does not fit the context"):
        source.draw([[]], 8, 0, [[5] * 100_000])
    source.close()


def test_another_engine_is_refused(smollm2_gguf: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"from which llama\.cpp samples, not vllm"):
        LMConfig(engine="vllm").load_source(str(smollm2_gguf), 8)
