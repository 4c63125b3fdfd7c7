"""Constraints hold whatever the language model, also beyond the range of float32."""

import pytest
import torch

from foretrace.attribute import Attribute
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, HMMConfig
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal, PrefixTracker, Request
from goals import plain_goal
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

END, OTHER_END = 2, 3


def sample(goals: tuple[Goal, ...], limit: int, seed: int, ends: tuple[int, ...] = ()) -> list[int]:
    """Sample from random logits that favour the end-of-text tokens."""
    generator = torch.Generator().manual_seed(seed)
    request = Request(goals, (0,), limit, ends=ends)
    tracker = PrefixTracker(goals[0].lookahead.hmm)
    generated: list[int] = []
    for _ in range(limit):
        tracker.step([request], [generated])
        logits = torch.randn(1, TOKENS, generator=generator) * 3
        logits[:, [END, OTHER_END]] += 5
        steered = tracker.reweight(logits).softmax(-1)
        generated = [*generated, int(torch.multinomial(steered, 1, generator=generator))]
        if generated[-1] in request.ends:
            break
    return generated


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("horizon", [0, 2, 64])
@pytest.mark.parametrize("neutral_end", [False, True])
def test_required_texts_occur_and_forbidden_texts_do_not(
    dtype: torch.dtype, horizon: int, neutral_end: bool
) -> None:
    hmm, spelled = tiny_hmm("eos").to(dtype=dtype), (b"a", b"b", b"c", b"")
    must, must_not = (Attribute.contains(text, spelled) for text in ("abba", "aa"))
    lookahead = Lookahead(hmm, must & ~must_not & attributes()["one"], horizon)
    for transform in ((1.0, 0.0), (5.0, -3.0)):
        for seed in range(6):
            for limit in (4, 9):
                goal = plain_goal(lookahead, *transform, neutral_end=neutral_end)
                tokens = sample((goal,), limit, seed, ends=(OTHER_END,) if seed % 2 else ())
                text = b"".join(spelled[token] for token in tokens if token != END)
                assert b"abba" in text
                assert b"aa" not in text


def test_two_goals_with_constraints_are_refused() -> None:
    """Each leaves tokens that satisfy it, but perhaps none that satisfies both."""
    hmm = tiny_hmm("eos")
    goals = [
        plain_goal(Lookahead(hmm, attributes()[name], 8)) for name in ("must", "must not", "one")
    ]
    Request((goals[0], goals[2]), (), 9)
    with pytest.raises(InvalidInputError, match="Join them by &"):
        Request(tuple(goals), (), 9)


def test_a_sequence_that_cannot_continue_ends() -> None:
    """If the only token that satisfies the constraint ends the text, the text ends."""
    lookahead = Lookahead(tiny_hmm("dense"), Attribute.contains("cc", SPELLED), 8)
    tokens = sample((plain_goal(lookahead),), 2, 0, ends=(END,))
    assert tokens == [END]


def test_constraints_that_do_not_fit_the_limit_are_refused() -> None:
    lookahead = Lookahead(tiny_hmm("eos"), Attribute.contains("abbab", SPELLED), 8)
    Request((plain_goal(lookahead),), (), 4)  # a, b, b, ab; or ab, b, ab
    with pytest.raises(InvalidInputError, match="takes 3 tokens at least"):
        Request((plain_goal(lookahead),), (), 2)


def test_a_rare_text_does_not_underflow_float32() -> None:
    """Its probability is 1e-100; tokens that lead to it are still preferred."""
    emission = torch.tensor([[1e-10, 1e-10], [0.5, 0.7], [0.0, 0.0], [0.5, 0.3]])
    emission = (emission / emission.sum(0)).double()
    uniform = torch.full((2, 2), 0.5, dtype=torch.float64)
    wide = HMM(uniform[0], uniform, emission, HMMConfig())
    steered = []
    for hmm in (wide, wide.to(dtype=torch.float32)):
        lookahead = Lookahead(hmm, Attribute.contains("a" * 10, SPELLED), 64)
        assert int(lookahead.tables.log_scales[10, 0, 0]) < -200
        tracker = PrefixTracker(hmm)
        rows = [Request((plain_goal(lookahead),), (), 30)] * 3
        tracker.step(rows, [[0] * 5, [0] * 9, [1] * 4])
        steered.append(tracker.reweight(torch.zeros(3, TOKENS)).log_softmax(-1).double())
    torch.testing.assert_close(steered[0], steered[1], rtol=1e-4, atol=1e-4)
    assert (steered[0].exp()[:2, [0, 3]].sum(1) > 0.999).all()  # a, or ab


def test_rows_of_a_batch_are_steered_as_alone() -> None:
    hmm = tiny_hmm("sparse")
    names = ["must", "must and must not", "one", "weighed and must", "not weighed, and must"]
    goals = [
        plain_goal(Lookahead(hmm, attributes()[name], 8), *more)
        for name in names
        for more in ((), (3, -2))
    ]
    requests = [Request((goal,), (1,), 12) for goal in goals]
    requests += [Request((goals[0], goals[4], goals[5]), (2,), 12), Request((), (1,), 12)]
    texts = [[token % TOKENS for token in range(row % 4)] for row in range(len(requests))]
    logits = torch.randn(len(requests), TOKENS, generator=torch.Generator().manual_seed(0)).double()
    together = PrefixTracker(hmm)
    together.step(requests, texts)
    steered = together.reweight(logits).log_softmax(-1)
    for row, (request, text) in enumerate(zip(requests, texts, strict=True)):
        alone = PrefixTracker(hmm)
        for end in range(len(text) + 1):  # token by token, not all at once
            alone.step([request], [text[:end]])
        torch.testing.assert_close(
            alone.reweight(logits[row : row + 1])[0].log_softmax(-1), steered[row]
        )


def test_goals_of_one_lookahead_keep_their_own_transforms() -> None:
    hmm = tiny_hmm("sparse")
    lookahead = Lookahead(hmm, attributes()["weighed and must"], 8)
    other = Lookahead(hmm, attributes()["must not"], 8)
    transforms = [(1.0, 0.0), (3.0, -2.0), (1.0, -2.0), (5.0, 1.0)]
    goals = [
        plain_goal(target, *transform) for transform in transforms for target in (lookahead, other)
    ]
    requests = [Request((goal,), (1,), 12) for goal in goals]
    logits = torch.zeros(len(requests), TOKENS, dtype=torch.float64)
    together = PrefixTracker(hmm)
    for order in (requests, requests[::-1]):
        together.step(order, [[0]] * len(order))
        steered = together.reweight(logits).log_softmax(-1)
        for row, request in enumerate(order):
            alone = PrefixTracker(hmm)
            alone.step([request], [[0]])
            expected = alone.reweight(logits[:1])[0].log_softmax(-1)
            torch.testing.assert_close(steered[row], expected)


@pytest.mark.parametrize("name", ["not weighed, and must", "weighed or must", "must and must not"])
def test_float32_agrees_with_float64(name: str) -> None:
    """Also with terms of both signs: small probabilities keep their digits."""
    wide = HMM.random(32, TOKENS, eos_token_id=2, seed=3, dtype=torch.float64)
    attribute = attributes()[name] & Attribute.contains("babababab", SPELLED)
    steered = []
    for hmm in (wide, wide.to(dtype=torch.float32)):
        tracker = PrefixTracker(hmm)
        rows = [Request((plain_goal(Lookahead(hmm, attribute, 20)),), (1,), 16)] * 3
        tracker.step(rows, [[], [1, 0], [3, 1, 3, 1]])
        steered.append(tracker.reweight(torch.zeros(3, TOKENS)).softmax(-1).double())
    torch.testing.assert_close(steered[0], steered[1], rtol=0, atol=1e-4)


def test_absolute_logits_include_the_common_summand() -> None:
    """The language model's logits keep their digits, also where most tokens are forbidden."""
    hmm = tiny_hmm("dense").to(dtype=torch.float32)
    lookahead = Lookahead(hmm, Attribute.contains("abab", SPELLED), 8)
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0]])
    for generated, limit in (([0], 5), ([0, 1], 3), ([3], 2)):  # the last allows one token
        trackers = [PrefixTracker(hmm, absolute=flag) for flag in (True, False)]
        for tracker in trackers:
            tracker.step([Request((plain_goal(lookahead),), (1,), limit)], [generated])
        absolute, relative = (tracker.reweight(logits) for tracker in trackers)
        torch.testing.assert_close(absolute.softmax(-1), relative.softmax(-1))
        eap = (absolute - logits).exp()[0]
        assert ((eap >= 0) & (eap <= 1)).all()
        if generated == [3]:
            assert eap[[0, 1, 2]].tolist() == [0.0, 0.0, 0.0]
            assert float(eap[3]) == pytest.approx(1.0)


def test_the_horizon_of_a_request_does_not_apply_to_constraints() -> None:
    """A constraint may be satisfied at any time before the end."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["must"], 8)
    steered = []
    for horizon in (None, 0):
        tracker = PrefixTracker(hmm)
        tracker.step([Request((plain_goal(lookahead),), (1,), 9, horizon)], [[1]])
        steered.append(tracker.reweight(torch.zeros(1, TOKENS)))
    assert torch.equal(*steered)


def test_constraints_hold_after_a_past_of_weight_zero() -> None:
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])
    attribute = Attribute.from_weights(weights) & Attribute.contains("abab", SPELLED)
    hmm, steered = tiny_hmm("dense"), []
    for first in (1, 2):
        tracker = PrefixTracker(hmm)
        goal = plain_goal(Lookahead(hmm, attribute, 8))
        request = Request((goal,), (1,), 9)
        tracker.step([request], [[first]])
        steered.append(tracker.reweight(torch.zeros(1, TOKENS)).log_softmax(-1))
    assert steered[1].isfinite().all()
    assert float(steered[1][0, 3]) > float(steered[1][0, 1])  # ab is nearer to abab than b


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_vocabularies_may_differ_in_size(form: str) -> None:
    """Tokens outside the HMM's or the attribute's vocabulary do not move the automaton."""
    hmm = tiny_hmm(form)
    more = Attribute.contains("aba", [*SPELLED, b"", b"aba"])
    same = Lookahead(hmm, Attribute.contains("aba", SPELLED), 5)
    start = torch.tensor([1])
    torch.testing.assert_close(Lookahead(hmm, more, 5).eap(start, 4), same.eap(start, 4))
    for attribute in (
        ~Attribute.contains("a", SPELLED[:3]),
        Attribute.contains("ab", SPELLED[:3]),
    ):
        automaton = Lookahead(hmm, attribute, 5).automaton
        assert automaton is not None
        states = torch.arange(len(automaton.transitions))
        assert torch.equal(automaton.step(states, torch.full_like(states, 3)), states)


def test_logits_of_half_precision() -> None:
    lookahead = Lookahead(tiny_hmm("eos").to(dtype=torch.float32), attributes()["must"], 8)
    tracker = PrefixTracker(lookahead.hmm)
    tracker.step([Request((plain_goal(lookahead, neutral_end=True),), (1,), 9)], [[0]])
    steered = tracker.reweight(torch.zeros(1, TOKENS, dtype=torch.float16))
    assert float(steered.float().softmax(-1)[0, END]) == 0.0
    assert not steered.isnan().any()
