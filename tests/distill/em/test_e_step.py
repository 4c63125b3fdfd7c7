"""Expected counts equal a brute-force sum over all state paths."""

import pytest
import torch

from foretrace.distill.em import e_step
from foretrace.distill.em.e_step import BatchCounts, BatchParameters, EStep, Workspace
from foretrace.hmm import HMM
from tiny import LENGTH, STATES, TOKENS, all_texts, dense_tables, path_probabilities, tiny_hmm


def parameters_of(hmm: HMM) -> BatchParameters:
    return BatchParameters(*dense_tables(hmm))


def count(hmm: HMM, texts: torch.Tensor, dtype: torch.dtype = torch.float64) -> BatchCounts:
    counts = BatchCounts.zeros(TOKENS, hmm.num_states, Workspace(hmm.initial))
    EStep(hmm.num_states, texts.shape[1], dtype, hmm.initial).accumulate(
        parameters_of(hmm), texts, counts
    )
    return counts


@pytest.mark.parametrize("form", ["dense", "sparse", "eos"])
@pytest.mark.parametrize("width", [None, 7])
@pytest.mark.parametrize("stretch", [1, 3, 8])
def test_counts_equal_enumeration(
    form: str, width: int | None, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e_step, "STRETCH", stretch)
    if width is not None:  # a batch that is processed in slices gives the same counts
        monkeypatch.setattr(e_step, "BUFFER_ELEMENTS", width * STATES * LENGTH)
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    paths, joint = path_probabilities(hmm, texts)
    possible = joint.sum(0) > 0
    texts, joint = texts[possible], joint[:, possible]
    counts = count(hmm, texts)
    posterior = joint / joint.sum(0)  # (P, N)
    weight = posterior.sum(1)  # (P,)
    initial = torch.zeros(STATES, dtype=torch.float64).index_add_(0, paths[:, 0], weight)
    transition = torch.zeros(STATES * STATES, dtype=torch.float64)
    emission = torch.zeros(TOKENS * STATES, dtype=torch.float64)
    for t in range(LENGTH):
        if t:
            transition.index_add_(0, paths[:, t - 1] * STATES + paths[:, t], weight)
        codes = texts[:, t][None] * STATES + paths[:, t][:, None]  # (P, N)
        emission.index_add_(0, codes.flatten(), posterior.flatten())
    torch.testing.assert_close(counts.initial, initial, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(counts.transition.flatten(), transition, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(counts.rows.flatten(), emission, rtol=1e-10, atol=1e-10)
    likelihood = joint.sum(0).log().sum()
    torch.testing.assert_close(counts.summary[0], likelihood, rtol=1e-10, atol=0)
    assert counts.summary[1] == len(texts)


def test_half_precision_counts_are_close() -> None:
    hmm = HMM.random(64, TOKENS, seed=1)
    texts = hmm.sample(200, 30, seed=2)
    exact, half = count(hmm, texts, torch.float32), count(hmm, texts, torch.bfloat16)
    assert half.rows.dtype == torch.float32
    torch.testing.assert_close(half.rows, exact.rows, rtol=0.03, atol=0.05)
    torch.testing.assert_close(half.transition.sum(), exact.transition.sum(), rtol=0.01, atol=0)


def test_an_impossible_sequence_adds_no_counts() -> None:
    hmm = tiny_hmm("eos")  # after end of text (2) nothing else can follow
    possible = torch.tensor([[0, 1, 3, 2, 2]])
    both = torch.cat([possible, torch.tensor([[0, 2, 1, 1, 3]])])
    alone, together = count(hmm, possible), count(hmm, both)
    for name in ("initial", "transition", "rows"):
        assert torch.equal(getattr(alone, name), getattr(together, name))
    assert together.summary[0].isfinite()
    assert together.summary[1] == 1  # only possible sequences are counted


def test_evidence_for_unreachable_states_stays_finite() -> None:
    hmm = HMM(
        initial=torch.tensor([1.0, 0.0]),
        transition=torch.eye(2),
        emission=torch.tensor([[0.01, 0.99], [0.99, 0.01]]),
    )
    counts = BatchCounts.zeros(2, 2, Workspace(hmm.initial))
    texts = torch.zeros(1, 300, dtype=torch.long)
    tables = parameters_of(hmm.to(dtype=torch.float64))
    parameters = tables.to(torch.float32)
    EStep(2, 300, torch.float32, hmm.initial).accumulate(parameters, texts, counts)
    torch.testing.assert_close(counts.rows, torch.tensor([[300.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("form", ["dense", "eos"])  # with end of text, some texts are impossible
def test_the_forward_pass_gives_the_log_likelihood(form: str) -> None:
    hmm = tiny_hmm(form)
    texts = all_texts(LENGTH)
    actual = e_step.log_likelihood(parameters_of(hmm), texts)
    torch.testing.assert_close(actual, hmm.log_likelihood(texts))
