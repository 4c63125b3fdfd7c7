"""Steering: the theorem, and that the state is a cache."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, HMMConfig
from foretrace.lookahead import Lookahead
from foretrace.steering import BatchSteering, Goal, PrefixTracker, Request
from foretrace.steering.batch import READ_BACK
from tiny import TOKENS, all_texts, tiny_hmm
from tiny_attributes import WEIGHTS, attributes

LENGTH = 4


def log_likelihood_of_next(hmm: HMM, texts: Tensor) -> Tensor:
    """An LM that is the HMM: log p(next token | text), (n, V)."""
    if texts.shape[1] == 0:
        return hmm.emission.predict(hmm.initial.expand(len(texts), -1)).log()
    return hmm.emission.predict(hmm.filter(texts).predicted[:, -1]).log()


@pytest.mark.parametrize("name", attributes())
@pytest.mark.parametrize("form", ["dense", "sparse", "eos"])
def test_steered_by_itself_the_hmm_writes_from_the_posterior(form: str, name: str) -> None:
    """p'(x) is p(x) p(s | x) / p(s), exactly: multiplied up over all texts, and by drawing."""
    hmm, attribute = tiny_hmm(form), attributes()[name]
    texts = all_texts(LENGTH)
    eos = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    joint = hmm.log_likelihood(texts).exp() * attribute.probability(texts, ~torch.isin(texts, eos))
    joint = torch.where(hmm.log_likelihood(texts) > -60, joint, 0.0)
    expected = joint / joint.sum()
    request = Request((Goal(Lookahead(hmm, attribute, LENGTH)),), (), LENGTH)
    steering, log_steered = PrefixTracker(hmm), torch.zeros(len(texts), dtype=torch.float64)
    for length in range(LENGTH):
        prefixes = torch.tensor(list(itertools.product(range(TOKENS), repeat=length))).long()
        prefixes = prefixes.reshape(TOKENS**length, length)
        steering.step([request] * len(prefixes), prefixes.tolist())
        logits = log_likelihood_of_next(hmm, prefixes)
        steered = steering.reweight(logits).log_softmax(-1)
        log_steered += steered.flatten().repeat_interleave(TOKENS ** (LENGTH - length - 1))
    found = torch.where(joint > 0, log_steered.exp(), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_sampled_texts_are_of_the_posterior() -> None:
    hmm, attribute = tiny_hmm("dense"), attributes()["all"]
    texts = all_texts(LENGTH)
    joint = hmm.log_likelihood(texts).exp() * attribute.probability(texts)
    request = Request((Goal(Lookahead(hmm, attribute, LENGTH)),), (), LENGTH)
    steering, count = PrefixTracker(hmm), 20_000
    generator = torch.Generator().manual_seed(0)
    drawn = torch.zeros(count, 0, dtype=torch.long)
    for _ in range(LENGTH):
        steering.step([request] * count, drawn.tolist())
        steered = steering.reweight(log_likelihood_of_next(hmm, drawn)).softmax(-1)
        drawn = torch.cat([drawn, torch.multinomial(steered, 1, generator=generator)], 1)
    code = (drawn * TOKENS ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    counts = torch.bincount(code, minlength=TOKENS**LENGTH)
    assert chisquare(counts, count * joint / joint.sum()).pvalue > 1e-3


def test_memory_is_a_belief_and_a_past_for_each_row() -> None:
    """Per row h numbers and K sums; per attribute (horizon + 1) K h numbers, and K V of tokens."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["all"], 7)
    terms = len(lookahead.terms)
    assert lookahead.tables.values.nbytes == 8 * 8 * terms * hmm.num_states
    tokens, tables = len(lookahead.tokens), sum(table.nbytes for table in lookahead.tables)
    assert lookahead.nbytes == tables + 8 * (terms * (TOKENS + tokens) + tokens)
    steering = PrefixTracker(hmm)
    requests = [Request((Goal(lookahead),), (1, 2), 9) for _ in range(3)]
    for written in ([], [1], [1, 3]):
        steering.step(requests, [written] * 3)
    assert len(steering._cache) == len(steering.states) == 3
    row = steering.states[0]
    assert row is not None
    assert row.predicted.shape == (hmm.num_states,)
    assert [past.shape for past in row.log_past] == [(terms,)]


def test_logits_of_other_rows_are_refused() -> None:
    hmm = tiny_hmm("dense")
    steering = PrefixTracker(hmm)
    steering.step([Request((), (), 5)], [[]])
    with pytest.raises(InvalidInputError, match="1 rows"):
        steering.reweight(torch.zeros(2, TOKENS))
    with pytest.raises(InvalidInputError, match="4 tokens"):
        steering.reweight(torch.zeros(1, TOKENS - 1))


@pytest.mark.parametrize("name", ["one", "not", "or", "all"])
def test_long_improbable_texts_are_still_steered(name: str) -> None:
    """In float32 as in float64: nothing underflows, and the LM's logits are not lost."""
    attribute = attributes()[name]
    written = [token % TOKENS for token in range(400)]
    found = []
    for dtype in (torch.float32, torch.float64):
        hmm = tiny_hmm("dense").to(dtype=dtype)
        request = Request((Goal(Lookahead(hmm, attribute, LENGTH), 2.0, -1.0),), (), 1000)
        steering = PrefixTracker(hmm)
        steering.step([request], [written])
        logits = torch.tensor([[0.25, 0.5, 0.125, 0.0]], dtype=dtype)
        found.append(steering.reweight(logits).log_softmax(-1).double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
    assert found[0].std() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_tables_of_any_dtype(dtype: torch.dtype, form: str) -> None:
    exact, rounded = tiny_hmm(form), tiny_hmm(form).to(dtype=dtype)
    found = []
    for hmm in (exact, rounded):
        lookahead = Lookahead(hmm, attributes()["all"], LENGTH)
        steering = PrefixTracker(hmm)
        steering.step([Request((Goal(lookahead),), (1, 2), 9)], [[3]])
        found.append(steering.reweight(torch.zeros(1, TOKENS)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0.1)


def test_tokens_that_the_hmm_does_not_know_are_passed_over() -> None:
    hmm = tiny_hmm("dense")
    goal = Goal(Lookahead(hmm, attributes()["one"], LENGTH))
    known, with_unknown = PrefixTracker(hmm), PrefixTracker(hmm)
    known.step([Request((goal,), (1, 2), 9)], [[3]])
    request = Request((goal,), (1, TOKENS + 5, 2), 9)
    with_unknown.step([request], [[]])
    with_unknown.step([request], [[3]])
    logits = torch.zeros(1, TOKENS + 10)
    torch.testing.assert_close(known.reweight(logits), with_unknown.reweight(logits))
    with_unknown.step([request], [[3, TOKENS + 1]])
    assert with_unknown.reweight(logits)[0, :TOKENS].isfinite().all()


@pytest.mark.parametrize("name", ["one", "not", "all"])
def test_a_neutral_end_is_as_probable_as_before(name: str) -> None:
    """And the other tokens stand to each other as they would without."""
    hmm = tiny_hmm("dense")
    known = HMM(hmm.initial, hmm.transition, hmm.emission, HMMConfig(eos_token_ids=(TOKENS - 1,)))
    lookahead, logits = Lookahead(known, attributes()[name], 5), torch.randn(1, TOKENS)
    found = []
    for neutral in (False, True):
        steering = PrefixTracker(known)
        steering.step([Request((Goal(lookahead, 3.0, -2.0, neutral),), (1, 2), 9)], [[1]])
        found.append(steering.reweight(logits).softmax(-1))
    plain, kept = found
    torch.testing.assert_close(kept[:, -1], logits.softmax(-1)[:, -1])
    others = [each[:, :-1] / each[:, :-1].sum() for each in (plain, kept)]
    torch.testing.assert_close(*others)
    assert not torch.allclose(plain[:, -1], kept[:, -1])


def persistent_hmm() -> HMM:
    """Two states that hardly ever change; tokens 0 and 1 tell them apart, 2 and 3 do not."""
    transition = torch.tensor([[0.999, 0.001], [0.001, 0.999]], dtype=torch.float64)
    emission = torch.tensor([[0.2, 0.0], [0.0, 0.2], [0.5, 0.5], [0.3, 0.3]], dtype=torch.float64)
    return HMM(torch.tensor([0.5, 0.5], dtype=torch.float64), transition, emission)


@pytest.mark.parametrize("num_generated", [0, 50])
def test_the_filter_reads_the_last_tokens_of_a_sequence(num_generated: int) -> None:
    assert READ_BACK == 128
    steering, later = BatchSteering(persistent_hmm()), [2] * (READ_BACK - 1)
    predicted = []
    for tokens in ([2] * 40 + [0] + later, [2] * 40 + [0, 2] + later):
        prompt, generated = tokens[: len(tokens) - num_generated], tokens[-num_generated:]
        request = Request((), tuple(prompt if num_generated else tokens), 100)
        (state,) = steering.read_generated([request], [generated if num_generated else []])
        predicted.append(float(state.predicted[0]))
    assert predicted[0] == pytest.approx(0.5 + 0.5 * 0.998**READ_BACK)
    assert predicted[1] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["one", "must"])
def test_all_generated_tokens_count_however_many_they_are(name: str) -> None:
    """Also those that the filter does not read: their weights, and what an automaton has seen."""
    lookahead = Lookahead(tiny_hmm("dense"), attributes()[name], LENGTH)
    generated = [0, 1, 0] + [2] * (READ_BACK + 10)
    request = Request((Goal(lookahead),), (1,), 1000)
    (state,) = BatchSteering(lookahead.hmm).read_generated([request], [generated])
    expected = lookahead.log_weights(torch.tensor(generated)).sum(0)
    torch.testing.assert_close(state.log_past[0], expected)
    if lookahead.automaton is not None:
        (automaton_state,) = state.automaton_states
        assert int(lookahead.automaton.min_tokens[automaton_state]) == 0


@pytest.mark.parametrize("name", ["one", "all"])
def test_unknown_tokens_change_nothing_but_the_count(name: str) -> None:
    """Whether they are read or advance a state, and wherever they stand in the sequence."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()[name], LENGTH)
    steering, request = BatchSteering(hmm), Request((Goal(lookahead),), (1,), 20)
    texts = [[0, 3], [0, TOKENS, 3], [TOKENS + 9, 0, 3], [0, 3, TOKENS]]
    known, *unknown = steering.read_generated([request] * len(texts), texts)
    unknown += steering.advance([known], torch.tensor([TOKENS]))
    for state in unknown:
        assert state.num_generated == 3
        torch.testing.assert_close(state.predicted, known.predicted)
        torch.testing.assert_close(state.log_past[0], known.log_past[0])


def test_a_shift_alone_transforms_the_eap() -> None:
    """Strength 1 with a shift is not the identity."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["one"], LENGTH)
    tracker = PrefixTracker(hmm)
    goals = [Goal(lookahead), Goal(lookahead, 1.0, -2.0)]
    tracker.step([Request((goal,), (1,), LENGTH) for goal in goals], [[], []])
    identity, shifted = tracker.reweight(torch.zeros(2, TOKENS, dtype=torch.float64)).softmax(-1)
    eap = lookahead.eap([1], LENGTH - 1)
    expected = torch.sigmoid(torch.logit(eap) - 2)
    torch.testing.assert_close(identity, eap / eap.sum())
    torch.testing.assert_close(shifted, expected / expected.sum())


@pytest.mark.parametrize("transform", [(1.0, 0.0), (3.0, -2.0)])
def test_the_coefficient_of_a_single_term_counts(transform: tuple[float, float]) -> None:
    hmm, logits = tiny_hmm("dense"), torch.zeros(1, TOKENS, dtype=torch.float64)
    half = torch.tensor([0.5], dtype=torch.float64)
    terms = Terms(half, torch.arange(TOKENS, dtype=torch.int32), WEIGHTS[:1].log())
    goal = Goal(Lookahead(hmm, Attribute(terms), LENGTH), *transform)
    whole = Lookahead(hmm, attributes()["one"], LENGTH).eap([1], LENGTH - 1)
    torch.testing.assert_close(goal.lookahead.eap([1], LENGTH - 1), whole / 2)
    tracker = PrefixTracker(hmm, absolute=True)
    tracker.step([Request((goal,), (1,), LENGTH)], [[]])
    torch.testing.assert_close(tracker.reweight(logits).exp()[0], goal.transform(whole / 2))
