"""What must occur does, whatever the LM; and what differs beyond float32 keeps its order."""

import pytest
import torch

from foretrace.attribute import Attribute
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, HMMConfig
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal, PrefixTracker, Request
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

END, OTHER_END = 2, 3


def write(goals: tuple[Goal, ...], limit: int, seed: int, ends: tuple[int, ...] = ()) -> list[int]:
    """Draw from an LM that knows nothing of the goals, and would rather end the text."""
    generator = torch.Generator().manual_seed(seed)
    request = Request(goals, (0,), limit, ends=ends)
    steering = PrefixTracker(goals[0].lookahead.hmm)
    written: list[int] = []
    for _ in range(limit):
        steering.step([request], [written])
        logits = torch.randn(1, TOKENS, generator=generator) * 3
        logits[:, [END, OTHER_END]] += 5
        steered = steering.reweight(logits).softmax(-1)
        written = [*written, int(torch.multinomial(steered, 1, generator=generator))]
        if written[-1] in request.ends:
            break
    return written


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("horizon", [0, 2, 64])
@pytest.mark.parametrize("neutral_end", [False, True])
def test_what_must_occur_does_and_what_must_not_does_not(
    dtype: torch.dtype, horizon: int, neutral_end: bool
) -> None:
    hmm, spelled = tiny_hmm("eos").to(dtype=dtype), (b"a", b"b", b"c", b"")
    must, must_not = (Attribute.occurrence(text, spelled) for text in ("abba", "aa"))
    lookahead = Lookahead(hmm, must & ~must_not & attributes()["one"], horizon)
    for transform in ((1.0, 0.0), (5.0, -3.0)):
        for seed in range(20):
            for limit in (4, 9):
                goal = Goal(lookahead, *transform, neutral_end=neutral_end)
                tokens = write((goal,), limit, seed, ends=(OTHER_END,) if seed % 2 else ())
                text = b"".join(spelled[each] for each in tokens if each != END)
                assert b"abba" in text
                assert b"aa" not in text


def test_two_goals_with_automata_are_to_be_joined() -> None:
    """Apart, each would leave a way to its end, but perhaps not both the same one."""
    hmm = tiny_hmm("eos")
    goals = [Goal(Lookahead(hmm, attributes()[name], 8)) for name in ("must", "must not", "one")]
    Request((goals[0], goals[2]), (), 9)
    with pytest.raises(InvalidInputError, match="Join them by &"):
        Request(tuple(goals), (), 9)


def test_a_text_that_cannot_go_on_ends() -> None:
    """Who lets the token end a text that it needs gets an end, and never no token at all."""
    lookahead = Lookahead(tiny_hmm("dense"), Attribute.occurrence("cc", SPELLED), 8)
    tokens = write((Goal(lookahead),), 2, 0, ends=(END,))
    assert tokens == [END]


def test_goals_without_room_are_refused() -> None:
    lookahead = Lookahead(tiny_hmm("eos"), Attribute.occurrence("abbab", SPELLED), 8)
    Request((Goal(lookahead),), (), 4)  # a, b, b, ab; or ab, b, ab
    with pytest.raises(InvalidInputError, match="takes 3 tokens at least"):
        Request((Goal(lookahead),), (), 2)


def test_a_rare_text_is_not_lost_in_float32() -> None:
    """Its probability is 1e-100: one step nearer to it is still told from one that is not."""
    emission = torch.tensor([[1e-10, 1e-10], [0.5, 0.7], [0.0, 0.0], [0.5, 0.3]])
    emission = (emission / emission.sum(0)).double()
    uniform = torch.full((2, 2), 0.5, dtype=torch.float64)
    wide = HMM(uniform[0], uniform, emission, HMMConfig())
    found = []
    for hmm in (wide, wide.to(dtype=torch.float32)):
        lookahead = Lookahead(hmm, Attribute.occurrence("a" * 10, SPELLED), 64)
        assert int(lookahead.tables.log_scales[10, 0, 0]) < -200
        steering = PrefixTracker(hmm)
        rows = [Request((Goal(lookahead),), (), 30)] * 3
        steering.step(rows, [[0] * 5, [0] * 9, [1] * 4])
        found.append(steering.reweight(torch.zeros(3, TOKENS)).log_softmax(-1).double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert (found[0].exp()[:2, [0, 3]].sum(1) > 0.999).all()  # a, or ab


def test_a_batch_is_as_its_rows() -> None:
    hmm = tiny_hmm("sparse")
    known = attributes()
    names = ["must", "must and must not", "one", "weighed and must", "not weighed, and must"]
    goals = [
        Goal(Lookahead(hmm, known[name], 8), *more) for name in names for more in ((), (3, -2))
    ]
    requests = [Request((goal,), (1,), 12) for goal in goals]
    requests += [Request((goals[0], goals[4], goals[5]), (2,), 12), Request((), (1,), 12)]
    texts = [[token % TOKENS for token in range(place % 4)] for place in range(len(requests))]
    logits = torch.randn(len(requests), TOKENS, generator=torch.Generator().manual_seed(0)).double()
    together = PrefixTracker(hmm)
    together.step(requests, texts)
    whole = together.reweight(logits).log_softmax(-1)
    for place, (request, text) in enumerate(zip(requests, texts, strict=True)):
        alone = PrefixTracker(hmm)
        for end in range(len(text) + 1):  # token by token, not all at once
            alone.step([request], [text[:end]])
        torch.testing.assert_close(
            alone.reweight(logits[place : place + 1])[0].log_softmax(-1), whole[place]
        )


def test_goals_of_one_lookahead_keep_their_own_transforms() -> None:
    hmm = tiny_hmm("sparse")
    lookahead = Lookahead(hmm, attributes()["weighed and must"], 8)
    other = Lookahead(hmm, attributes()["must not"], 8)
    transforms = [(1.0, 0.0), (3.0, -2.0), (1.0, -2.0), (5.0, 1.0)]
    goals = [Goal(each, *transform) for transform in transforms for each in (lookahead, other)]
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
def test_float32_is_as_good_as_float64(name: str) -> None:
    """Terms of both signs too: what must occur is improbable, and must not drown in 1 minus it."""
    wide = HMM.random(32, TOKENS, eos_token_id=2, seed=3, dtype=torch.float64)
    attribute = attributes()[name] & Attribute.occurrence("babababab", SPELLED)
    found = []
    for hmm in (wide, wide.to(dtype=torch.float32)):
        steering = PrefixTracker(hmm)
        rows = [Request((Goal(Lookahead(hmm, attribute, 20)),), (1,), 16)] * 3
        steering.step(rows, [[], [1, 0], [3, 1, 3, 1]])
        found.append(steering.reweight(torch.zeros(3, TOKENS)).softmax(-1).double())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)


def test_what_is_common_is_told_where_it_is_asked_for() -> None:
    """The LM's logits are not lost in it, also where most tokens are forbidden."""
    hmm = tiny_hmm("dense").to(dtype=torch.float32)
    lookahead = Lookahead(hmm, Attribute.occurrence("abab", SPELLED), 8)
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0]])
    for written, limit in (([0], 5), ([0, 1], 3), ([3], 2)):  # the last leaves no choice
        eap, steered = (PrefixTracker(hmm, absolute=flag) for flag in (True, False))
        for each in (eap, steered):
            each.step([Request((Goal(lookahead),), (1,), limit)], [written])
        whole, relative = eap.reweight(logits), steered.reweight(logits)
        torch.testing.assert_close(whole.softmax(-1), relative.softmax(-1))
        found = (whole - logits).exp()[0]
        assert ((found >= 0) & (found <= 1)).all()
        if written == [3]:
            assert found[[0, 1, 2]].tolist() == [0.0, 0.0, 0.0]
            assert float(found[3]) == pytest.approx(1.0)


def test_what_must_occur_has_time_until_the_end() -> None:
    """A request that looks 0 tokens ahead does not therefore want it at once."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["must"], 8)
    found = []
    for horizon in (None, 0):
        steering = PrefixTracker(hmm)
        steering.step([Request((Goal(lookahead),), (1,), 9, horizon)], [[1]])
        found.append(steering.reweight(torch.zeros(1, TOKENS)))
    assert torch.equal(*found)


def test_a_forbidden_past_leaves_the_automaton_its_say() -> None:
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])
    attribute = Attribute.from_weights(weights) & Attribute.occurrence("abab", SPELLED)
    hmm, found = tiny_hmm("dense"), []
    for first in (1, 2):
        steering = PrefixTracker(hmm)
        goal = Goal(Lookahead(hmm, attribute, 8))
        request = Request((goal,), (1,), 9)
        steering.step([request], [[first]])
        row = steering.states[0]
        assert row is not None
        found.append(steering.reweight(torch.zeros(1, TOKENS)).log_softmax(-1))
    assert found[1].isfinite().all()
    assert float(found[1][0, 3]) > float(found[1][0, 1])  # ab is nearer to abab than b


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_vocabularies_may_differ_in_size(form: str) -> None:
    """Tokens that the HMM does not know are not read, nor those that the tokenizer does not."""
    hmm = tiny_hmm(form)
    more = Attribute.occurrence("aba", [*SPELLED, b"", b"aba"])
    same = Lookahead(hmm, Attribute.occurrence("aba", SPELLED), 5)
    start = torch.tensor([1])
    torch.testing.assert_close(Lookahead(hmm, more, 5).eap(start, 4), same.eap(start, 4))
    fewer = Lookahead(hmm, ~Attribute.occurrence("a", SPELLED[:3]), 5)
    automaton = fewer.automaton
    assert automaton is not None
    states = torch.arange(len(automaton.transitions))
    assert torch.equal(automaton.step(states, torch.full_like(states, 3)), states)


def test_logits_of_half_precision() -> None:
    lookahead = Lookahead(tiny_hmm("eos").to(dtype=torch.float32), attributes()["must"], 8)
    steering = PrefixTracker(lookahead.hmm)
    steering.step([Request((Goal(lookahead, neutral_end=True),), (1,), 9)], [[0]])
    found = steering.reweight(torch.zeros(1, TOKENS, dtype=torch.float16))
    assert float(found.float().softmax(-1)[0, END]) == 0.0
    assert not found.isnan().any()
