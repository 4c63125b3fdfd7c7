"""Batch steering: exact posteriors, states, and numerical range."""

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
from foretrace.steering import Goal, PrefixTracker, Request, SlotSteering
from foretrace.steering.reading import READ_BACK, predict_after
from goals import plain_goal
from tiny import TOKENS, all_texts, tiny_hmm
from tiny_attributes import WEIGHTS, attributes

LENGTH = 4


def next_token_logits(hmm: HMM, texts: Tensor) -> Tensor:
    """Return the logits of a language model that is the HMM: log p(next token | text), (n, V)."""
    if texts.shape[1] == 0:
        return hmm.emission.predict(hmm.initial.expand(len(texts), -1)).log()
    return hmm.emission.predict(hmm.filter(texts).predicted[:, -1]).log()


def steered_log_probabilities(hmm: HMM, goals: tuple[Goal, ...]) -> Tensor:
    """Return the log-probability of every text of LENGTH tokens, of an LM that is the HMM."""
    request, tracker = Request(goals, (), LENGTH), PrefixTracker(hmm)
    total = torch.zeros(TOKENS**LENGTH, dtype=torch.float64)
    for length in range(LENGTH):
        prefixes = torch.tensor(list(itertools.product(range(TOKENS), repeat=length))).long()
        prefixes = prefixes.reshape(TOKENS**length, length)
        tracker.step([request] * len(prefixes), prefixes.tolist())
        steered = tracker.reweight(next_token_logits(hmm, prefixes)).log_softmax(-1)
        total += steered.flatten().repeat_interleave(TOKENS ** (LENGTH - length - 1))
    return total


def sampled_counts(hmm: HMM, goal: Goal, count: int) -> Tensor:
    """Sample texts of LENGTH tokens from an LM that is the HMM; count how often each occurs."""
    request, tracker = Request((goal,), (), LENGTH), PrefixTracker(hmm)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.zeros(count, 0, dtype=torch.long)
    for _ in range(LENGTH):
        tracker.step([request] * count, drawn.tolist())
        steered = tracker.reweight(next_token_logits(hmm, drawn)).softmax(-1)
        drawn = torch.cat([drawn, torch.multinomial(steered, 1, generator=generator)], 1)
    code = (drawn * TOKENS ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    return torch.bincount(code, minlength=TOKENS**LENGTH)


@pytest.mark.parametrize("name", attributes())
@pytest.mark.parametrize("form", ["dense", "sparse", "eos"])
def test_steering_the_hmm_itself_samples_the_exact_posterior(form: str, name: str) -> None:
    """The product of steered probabilities is p(x) p(s | x) / p(s) for every sequence x."""
    hmm, attribute = tiny_hmm(form), attributes()[name]
    texts = all_texts(LENGTH)
    eos = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    joint = hmm.log_likelihood(texts).exp() * attribute.probability(texts, ~torch.isin(texts, eos))
    joint = torch.where(hmm.log_likelihood(texts) > -60, joint, 0.0)
    expected = joint / joint.sum()
    goal = plain_goal(Lookahead(hmm, attribute, LENGTH))
    log_steered = steered_log_probabilities(hmm, (goal,))
    probabilities = torch.where(joint > 0, log_steered.exp(), 0.0)
    torch.testing.assert_close(probabilities, expected, rtol=1e-9, atol=1e-12)


def test_sampled_sequences_follow_the_posterior() -> None:
    hmm, attribute = tiny_hmm("dense"), attributes()["all"]
    texts = all_texts(LENGTH)
    joint = hmm.log_likelihood(texts).exp() * attribute.probability(texts)
    goal, count = plain_goal(Lookahead(hmm, attribute, LENGTH)), 20_000
    counts = sampled_counts(hmm, goal, count)
    assert chisquare(counts, count * joint / joint.sum()).pvalue > 1e-3


def test_a_row_stores_one_belief_and_one_past() -> None:
    """h numbers and K sums per row; (horizon + 1) K h and K V numbers per attribute."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["all"], 7)
    terms = len(lookahead.terms)
    assert lookahead.tables.values.nbytes == 8 * 8 * terms * hmm.num_states
    tokens, tables = len(lookahead.tokens), sum(table.nbytes for table in lookahead.tables)
    assert lookahead.nbytes == tables + 8 * (terms * (TOKENS + tokens) + tokens)
    tracker = PrefixTracker(hmm)
    requests = [Request((plain_goal(lookahead),), (1, 2), 9) for _ in range(3)]
    for written in ([], [1], [1, 3]):
        tracker.step(requests, [written] * 3)
    assert tracker.rows == [0, 1, 2]
    state = tracker.steering.state
    assert state.predicted.shape == (3, hmm.num_states)
    assert state.log_past.shape == (3, terms)


def test_logits_that_do_not_fit_the_batch_are_refused() -> None:
    hmm = tiny_hmm("dense")
    tracker = PrefixTracker(hmm)
    tracker.step([Request((), (), 5)], [[]])
    with pytest.raises(InvalidInputError, match="1 rows"):
        tracker.reweight(torch.zeros(2, TOKENS))
    with pytest.raises(InvalidInputError, match="4 tokens"):
        tracker.reweight(torch.zeros(1, TOKENS - 1))


@pytest.mark.parametrize("name", ["one", "not", "or", "all"])
def test_long_improbable_sequences_are_still_steered(name: str) -> None:
    """In float32 as in float64: nothing underflows, and the logits keep their digits."""
    attribute = attributes()[name]
    written = [token % TOKENS for token in range(400)]
    steered = []
    for dtype in (torch.float32, torch.float64):
        hmm = tiny_hmm("dense").to(dtype=dtype)
        request = Request((plain_goal(Lookahead(hmm, attribute, LENGTH), 2.0, -1.0),), (), 1000)
        tracker = PrefixTracker(hmm)
        tracker.step([request], [written])
        logits = torch.tensor([[0.25, 0.5, 0.125, 0.0]], dtype=dtype)
        steered.append(tracker.reweight(logits).log_softmax(-1).double())
    torch.testing.assert_close(steered[0], steered[1], rtol=1e-3, atol=1e-3)
    assert steered[0].std() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_an_hmm_of_any_dtype_steers_alike(dtype: torch.dtype, form: str) -> None:
    exact, rounded = tiny_hmm(form), tiny_hmm(form).to(dtype=dtype)
    steered = []
    for hmm in (exact, rounded):
        lookahead = Lookahead(hmm, attributes()["all"], LENGTH)
        tracker = PrefixTracker(hmm)
        tracker.step([Request((plain_goal(lookahead),), (1, 2), 9)], [[3]])
        steered.append(tracker.reweight(torch.zeros(1, TOKENS)))
    torch.testing.assert_close(steered[0], steered[1], rtol=0, atol=0.1)


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    hmm = tiny_hmm("dense")
    goal = plain_goal(Lookahead(hmm, attributes()["one"], LENGTH))
    tracker, with_unknown = PrefixTracker(hmm), PrefixTracker(hmm)
    tracker.step([Request((goal,), (1, 2), 9)], [[3]])
    request = Request((goal,), (1, TOKENS + 5, 2), 9)
    with_unknown.step([request], [[]])
    with_unknown.step([request], [[3]])
    logits = torch.zeros(1, TOKENS + 10)
    torch.testing.assert_close(tracker.reweight(logits), with_unknown.reweight(logits))
    with_unknown.step([request], [[3, TOKENS + 1]])
    assert with_unknown.reweight(logits)[0, :TOKENS].isfinite().all()


@pytest.mark.parametrize("name", ["one", "not", "all"])
def test_a_neutral_end_keeps_its_probability(name: str) -> None:
    """The ratios of the other tokens are those of tracker without neutral ends."""
    model, config = tiny_hmm("dense"), HMMConfig(eos_token_ids=(TOKENS - 1,))
    hmm = HMM(model.initial, model.transition, model.emission, config)
    lookahead, logits = Lookahead(hmm, attributes()[name], 5), torch.randn(1, TOKENS)
    steered = []
    for neutral in (False, True):
        tracker = PrefixTracker(hmm)
        tracker.step([Request((plain_goal(lookahead, 3.0, -2.0, neutral),), (1, 2), 9)], [[1]])
        steered.append(tracker.reweight(logits).softmax(-1))
    plain, kept = steered
    torch.testing.assert_close(kept[:, -1], logits.softmax(-1)[:, -1])
    others = [rows[:, :-1] / rows[:, :-1].sum() for rows in (plain, kept)]
    torch.testing.assert_close(*others)
    assert not torch.allclose(plain[:, -1], kept[:, -1])


def persistent_hmm() -> HMM:
    """Two states that hardly ever change; tokens 0 and 1 tell them apart, 2 and 3 do not."""
    transition = torch.tensor([[0.999, 0.001], [0.001, 0.999]], dtype=torch.float64)
    emission = torch.tensor([[0.2, 0.0], [0.0, 0.2], [0.5, 0.5], [0.3, 0.3]], dtype=torch.float64)
    return HMM(torch.tensor([0.5, 0.5], dtype=torch.float64), transition, emission)


@pytest.mark.parametrize("num_generated", [0, 50, 400])
def test_the_filter_reads_the_last_tokens_of_a_prompt_and_all_others(num_generated: int) -> None:
    assert READ_BACK == 128
    later = [2] * (READ_BACK - 1)
    predicted = []
    for prompt in ([2] * 40 + [0] + later, [2] * 40 + [0, 2] + later):
        tokens = torch.tensor([prompt + [2] * num_generated])
        lengths = torch.tensor([len(prompt)]), torch.tensor([tokens.shape[1]])
        predicted.append(float(predict_after(persistent_hmm(), tokens, *lengths)[0, 0]))
    assert predicted[0] == pytest.approx(0.5 + 0.5 * 0.998 ** (READ_BACK + num_generated))
    assert predicted[1] == pytest.approx(0.5)


def test_a_preempted_sequence_continues_in_the_state_that_it_had() -> None:
    """After 512 tokens, in an HMM that forgets slowly."""
    hmm = persistent_hmm()
    request = Request(
        (plain_goal(Lookahead(hmm, Attribute.from_weights(torch.rand(4)), LENGTH)),), (0,), 1000
    )
    generated = torch.randint(4, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    steering = SlotSteering(hmm)
    steering.read_generated([0, 1], [request] * 2, [generated, []])
    for token in generated:
        steering.advance([None, 1], torch.tensor([0, token]))
    torch.testing.assert_close(*steering.state.predicted[:2], rtol=0, atol=1e-12)
    torch.testing.assert_close(*steering.state.log_past[:2])


@pytest.mark.parametrize("name", ["one", "must"])
def test_all_generated_tokens_count_however_many_they_are(name: str) -> None:
    """Their weights, and what an automaton has seen."""
    lookahead = Lookahead(tiny_hmm("dense"), attributes()[name], LENGTH)
    generated = [0, 1, 0] + [2] * (READ_BACK + 10)
    request = Request((plain_goal(lookahead),), (1,), 1000)
    steering = SlotSteering(lookahead.hmm)
    steering.read_generated([0], [request], [generated])
    expected = lookahead.log_weights(torch.tensor(generated)).sum(0)
    torch.testing.assert_close(steering.state.log_past[0], expected)
    if lookahead.automaton is not None:
        automaton_state = steering.state.numbers[0, -1]
        assert int(lookahead.automaton.min_tokens[automaton_state]) == 0


@pytest.mark.parametrize("name", ["one", "all"])
def test_unknown_tokens_change_nothing_but_the_count(name: str) -> None:
    """Whether they are read or advance a state, and wherever they stand in the sequence."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()[name], LENGTH)
    steering, request = SlotSteering(hmm), Request((plain_goal(lookahead),), (1,), 20)
    texts = [[0, 3], [0, TOKENS, 3], [TOKENS + 9, 0, 3], [0, 3, TOKENS], [0, 3]]
    slots = list(range(len(texts)))
    steering.read_generated(slots, [request] * len(texts), texts)
    steering.advance([len(texts) - 1], torch.tensor([TOKENS]))
    state = steering.state
    assert state.numbers[slots, 0].tolist() == [2, 3, 3, 3, 3]
    for slot in slots[1:]:
        torch.testing.assert_close(state.predicted[slot], state.predicted[0])
        torch.testing.assert_close(state.log_past[slot], state.log_past[0])


def test_a_shift_or_a_strength_alone_transforms_the_eap() -> None:
    """Only strength 1 with shift 0 is the identity."""
    hmm, transforms = tiny_hmm("dense"), [(1.0, 0.0), (1.0, -2.0), (3.0, 0.0)]
    lookahead = Lookahead(hmm, attributes()["one"], LENGTH)
    requests = [
        Request((plain_goal(lookahead, *transform),), (1,), LENGTH) for transform in transforms
    ]
    tracker = PrefixTracker(hmm)
    tracker.step(requests, [[]] * len(requests))
    steered = tracker.reweight(torch.zeros(len(requests), TOKENS, dtype=torch.float64)).softmax(-1)
    logit = torch.logit(lookahead.eap([1], LENGTH - 1))
    for (strength, shift), probabilities in zip(transforms, steered, strict=True):
        expected = torch.sigmoid(strength * logit + shift)
        torch.testing.assert_close(probabilities, expected / expected.sum())


@pytest.mark.parametrize("transform", [(1.0, 0.0), (3.0, -2.0)])
def test_the_coefficient_of_a_single_term_counts(transform: tuple[float, float]) -> None:
    hmm, logits = tiny_hmm("dense"), torch.zeros(1, TOKENS, dtype=torch.float64)
    half = torch.tensor([0.5], dtype=torch.float64)
    terms = Terms(half, torch.arange(TOKENS, dtype=torch.int32), WEIGHTS[:1].log())
    goal = plain_goal(Lookahead(hmm, Attribute(terms), LENGTH), *transform)
    eap = Lookahead(hmm, attributes()["one"], LENGTH).eap([1], LENGTH - 1)
    torch.testing.assert_close(goal.lookahead.eap([1], LENGTH - 1), eap / 2)
    tracker = PrefixTracker(hmm, absolute=True)
    tracker.step([Request((goal,), (1,), LENGTH)], [[]])
    torch.testing.assert_close(tracker.reweight(logits).exp()[0], goal.transform(eap / 2))


@pytest.mark.parametrize("name", attributes())
def test_a_mask_keeps_its_tokens(name: str) -> None:
    """A grammar masks logits before steering: what it forbids stays so, and a token is left.

    This holds for every mask, also if the only tokens left are improbable under the HMM.
    """
    hmm = persistent_hmm()
    masks = torch.tensor(list(itertools.product([False, True], repeat=TOKENS)))[:-1]
    goal = plain_goal(Lookahead(hmm, attributes()[name], LENGTH), 3.0, neutral_end=True)
    request = Request((goal,), (0,), LENGTH, ends=(TOKENS - 1,))
    tracker = PrefixTracker(hmm)
    tracker.step([request] * len(masks), [[0]] * len(masks))
    logits = torch.randn(len(masks), TOKENS).masked_fill(masks, -torch.inf)
    probabilities = tracker.reweight(logits).softmax(-1)
    assert not probabilities.isnan().any()
    assert (probabilities[masks] == 0.0).all()
