"""Constraints hold whatever the language model, also beyond the range of float32."""

import pytest
import torch

from foretrace.attribute import Attribute
from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import CompiledGoal, Compiler, Goal, Marker, Request
from foretrace.steering.goal import REQUESTED_POWER, REQUIRED_POWER
from goals import compiled, plain_goal, reweighted, steer
from steering.test_exactness import first_steered
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

END, OTHER_END = 2, 3


def sample(goal: CompiledGoal, limit: int, seed: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """Sample from random logits that favour the end-of-text tokens."""
    generator = torch.Generator().manual_seed(seed)
    request, tracker = Request(goal, (0,), limit, stop_ids=stop_ids), PrefixTracker(goal.hmm)
    generated: list[int] = []
    for _ in range(limit):
        tracker.step([request], [generated])
        logits = torch.randn(1, TOKENS, generator=generator) * 3
        logits[:, [END, OTHER_END]] += 5
        steered = reweighted(tracker, logits).softmax(-1)
        generated = [*generated, int(torch.multinomial(steered, 1, generator=generator))]
        if generated[-1] in request.stop_ids:
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
    attribute = must & ~must_not & attributes()["one"]
    for transform in ((1.0, 0.0), (5.0, -3.0)):
        goal = plain_goal(hmm, attribute, horizon, *transform, neutral_end=neutral_end)
        for seed in range(15):
            for limit in (4, 9):
                tokens = sample(goal, limit, seed, (OTHER_END,) if seed % 2 else ())
                text = b"".join(spelled[token] for token in tokens if token != END)
                assert b"abba" in text
                assert b"aa" not in text


def test_every_text_of_positive_probability_has_the_required_text() -> None:
    """Also as it is brought forward, which is the default."""
    hmm = tiny_hmm("dense")
    request = Request(Compiler(hmm).compile(Goal(attributes()["must"])), (1,), 5)
    texts: list[list[int]] = [[]]
    for _ in range(5):
        logits = torch.zeros(len(texts), TOKENS, dtype=torch.float64)
        steered = steer(hmm, [request] * len(texts), texts, logits)
        texts = [
            [*text, int(token)]
            for text, row in zip(texts, steered, strict=True)
            for token in row.isfinite().nonzero()
        ]
    has_it = [b"aba" in b"".join(SPELLED[token] for token in text) for text in texts]
    assert len(texts) > 100
    assert all(has_it)


@pytest.mark.parametrize("name", ["must", "must and must not", "weighed and must"])
@pytest.mark.parametrize(
    ("prompt", "power"), [((1,), REQUIRED_POWER), ((1, 0, 1, 0, 2), REQUESTED_POWER)]
)
def test_missing_text_counts_more_unless_the_prompt_has_it(
    name: str, prompt: tuple[int, ...], power: float
) -> None:
    """The EAP is multiplied by a power of the probability that the text comes, on average."""
    hmm, attribute, remaining = tiny_hmm("dense"), attributes()[name], 4
    goal = plain_goal(hmm, attribute, 64)
    assert goal.required_power(prompt) == power
    lookahead = Lookahead(hmm, attribute, 64).with_missing()
    automaton = lookahead.terms.automaton
    assert automaton is not None
    states = automaton.dfa.step(torch.zeros(TOKENS).long(), torch.arange(TOKENS))
    expected = lookahead.eap(prompt, remaining).log()
    expected += (power - 1) * lookahead.tables.log_missing[remaining, 0, states]
    logits = torch.zeros(1, TOKENS, dtype=torch.float64)
    steered = steer(hmm, [Request(goal, prompt, remaining + 1)], [[]], logits)[0]
    torch.testing.assert_close(steered.softmax(-1), expected.softmax(-1))


def test_a_prompt_has_required_text_whatever_else_it_has() -> None:
    """Forbidden texts, and tokens outside the vocabulary, are skipped."""
    hmm, must_not = tiny_hmm("dense"), ~Attribute.contains("bb", SPELLED)
    goal = plain_goal(hmm, Attribute.contains("aba", SPELLED) & must_not, 8)
    a, b = SPELLED.index(b"a"), SPELLED.index(b"b")
    text = [b, b, TOKENS, a, b, a]
    assert goal.required_power(text) == REQUESTED_POWER
    assert goal.is_met(text[1:])
    assert not goal.is_met(text)
    assert goal.required_power([a, b, b]) == REQUIRED_POWER


@pytest.mark.parametrize(
    ("prompt", "power"),
    [
        ("ab without b.", REQUESTED_POWER),
        ("b. ab", REQUESTED_POWER),
        ("ab b", REQUESTED_POWER),
        (" b", REQUIRED_POWER),
        ("b.a.b", REQUIRED_POWER),
        ("b ab.", REQUESTED_POWER),
    ],
)
def test_a_prompt_may_have_forbidden_words(prompt: str, power: float) -> None:
    """After a forbidden word, every token that ends the word is forbidden."""
    letters = "ab .without"
    spelled = [letter.encode() for letter in letters]
    must, never = (Attribute.contains(text, spelled, whole_word=True) for text in ("ab", "b"))
    hmm = HMM.random(2, len(letters), seed=0)
    tokens = [letters.index(letter) for letter in prompt]
    assert Compiler(hmm, 8).compile(Goal(must & ~never)).required_power(tokens) == power


def test_forbidden_words_alone_keep_their_probability() -> None:
    """A forbidden whole word may become another word, but that is no required text."""
    spelled = (b"a", b"b", b" ", b".")
    never = ~Attribute.contains("b", spelled, whole_word=True)
    hmm = tiny_hmm("dense")
    goal = Compiler(hmm, 8).compile(Goal(never, 1.0, neutral_end=False))
    assert goal.requires_text
    assert goal.required_power([0, 2, 1]) is None
    request, logits = Request(goal, (0, 2), 4), torch.zeros(1, TOKENS, dtype=torch.float64)
    expected = Lookahead(hmm, never, 8).eap([0, 2], 3)
    steered = steer(hmm, [request], [[]], logits)[0].softmax(-1)
    torch.testing.assert_close(steered, expected / expected.sum())


def test_a_sequence_that_cannot_continue_ends() -> None:
    """If the only token that satisfies the constraint ends the text, the text ends."""
    goal = plain_goal(tiny_hmm("dense"), Attribute.contains("cc", SPELLED), 8)
    assert sample(goal, 2, 0, (END,)) == [END]


def test_a_goal_that_allows_nothing_but_the_end() -> None:
    """The constraint is satisfied, and all other tokens violate another one."""
    forbidding = ~Attribute.contains("a", SPELLED) & ~Attribute.contains("b", SPELLED)
    hmm = tiny_hmm("dense")
    request = Request(compiled(hmm, forbidding, 8), (1,), 9, stop_ids=(END,))
    steered = steer(hmm, [request], [[]], torch.randn(1, TOKENS))
    assert steered.isfinite()[0, END]
    assert steered.softmax(-1)[0, END] == 1.0


def test_a_rare_text_does_not_underflow_float32() -> None:
    """Its probability is 1e-100; tokens that lead to it are still preferred."""
    emission = torch.tensor([[1e-10, 1e-10], [0.5, 0.7], [0.0, 0.0], [0.5, 0.3]])
    uniform = torch.full((2, 2), 0.5, dtype=torch.float64)
    wide = HMM(uniform[0], uniform, (emission / emission.sum(0)).double())
    steered = []
    for hmm in (wide, wide.to(dtype=torch.float32)):
        request = Request(plain_goal(hmm, Attribute.contains("a" * 10, SPELLED), 64), (), 30)
        texts = [[0] * 5, [0] * 9, [1] * 4]
        rows = steer(hmm, [request] * 3, texts, torch.zeros(3, TOKENS))
        steered.append(rows.log_softmax(-1).double())
    torch.testing.assert_close(steered[0], steered[1], rtol=1e-4, atol=1e-4)
    assert (steered[0].exp()[:2, [0, 3]].sum(1) > 0.999).all()  # a, or ab


@pytest.mark.parametrize("name", ["not weighed, and must", "weighed or must", "must and must not"])
def test_float32_agrees_with_float64(name: str) -> None:
    """Also with terms of both signs: small probabilities keep their digits."""
    wide = HMM.random(32, TOKENS, eos_token_id=2, seed=3, dtype=torch.float64)
    attribute = attributes()[name] & Attribute.contains("babababab", SPELLED)
    steered = []
    for hmm in (wide, wide.to(dtype=torch.float32)):
        rows = [Request(plain_goal(hmm, attribute, 20), (1,), 16)] * 3
        texts = [[], [1, 0], [3, 1, 3, 1]]
        steered.append(steer(hmm, rows, texts, torch.zeros(3, TOKENS)).softmax(-1).double())
    torch.testing.assert_close(steered[0], steered[1], rtol=0, atol=1e-4)


def test_constraints_hold_after_a_past_of_weight_zero() -> None:
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])
    attribute = Attribute.from_weights(weights) & Attribute.contains("abab", SPELLED)
    hmm = tiny_hmm("dense")
    request = Request(plain_goal(hmm, attribute, 8), (1,), 9)
    steered = steer(hmm, [request] * 2, [[1], [2]], torch.zeros(2, TOKENS)).log_softmax(-1)
    assert steered[1].isfinite().all()
    assert float(steered[1, 3]) > float(steered[1, 1])  # ab is nearer to abab than b


def test_tokens_outside_a_vocabulary_do_not_move_the_automaton() -> None:
    """Neither tokens that the HMM lacks, nor tokens that the attribute lacks."""
    hmm, logits = tiny_hmm("dense"), torch.zeros(1, TOKENS, dtype=torch.float64)
    steered = []
    for spelled in (SPELLED, [*SPELLED, b"", b"aba"]):
        request = Request(plain_goal(hmm, Attribute.contains("aba", spelled), 5), (1,), 9)
        steered.append(steer(hmm, [request], [[0]], logits).softmax(-1))
    torch.testing.assert_close(*steered)
    short = Request(plain_goal(hmm, Attribute.contains("ab", SPELLED[:3]), 5), (1,), 3)
    rows = [steer(hmm, [short], [text], logits).isfinite() for text in ([0, 3], [0])]
    assert rows[0].tolist() == [[False, True, False, False]]  # b must follow, after a
    assert bool(rows[1][0, 3])


def test_logits_of_half_precision() -> None:
    hmm = tiny_hmm("eos").to(dtype=torch.float32)
    request = Request(plain_goal(hmm, attributes()["must"], 8, neutral_end=True), (1,), 9)
    steered = steer(hmm, [request], [[0]], torch.zeros(1, TOKENS, dtype=torch.float16))
    assert float(steered.float().softmax(-1)[0, END]) == 0.0
    assert not steered.isnan().any()


def test_a_marker_that_comes_too_late_begins_nothing() -> None:
    """The required text takes two tokens, and one is left: nothing is forbidden."""
    hmm, after = tiny_hmm("dense"), Marker("c", SPELLED)
    request = Request(compiled(hmm, attributes()["must"], 8, after=after), (), 4)
    texts = [[0, 0, 2], [0, 2], [0, 2, 3]]
    steered = steer(hmm, [request] * 3, texts, torch.zeros(3, TOKENS, dtype=torch.float64))
    assert steered[0].tolist() == [0.0] * TOKENS
    assert steered[1].isfinite().tolist() == [False, False, False, True]
    assert steered[2].isfinite().tolist() == [True, False, False, True]


def test_the_promise_is_for_the_window() -> None:
    """What must occur occurs after the marker and within the window, and not only before it."""
    hmm, after = tiny_hmm("dense"), Marker("c", SPELLED)
    request = Request(compiled(hmm, attributes()["must"], 8, after=after, window=4), (), 9)
    generator, tracker = torch.Generator().manual_seed(0), PrefixTracker(hmm)
    texts: list[list[int]] = [[]] * 200
    for _ in range(9):
        tracker.step([request] * 200, texts)
        steered = reweighted(tracker, torch.randn(200, TOKENS, generator=generator)).softmax(-1)
        drawn = torch.multinomial(steered, 1, generator=generator)
        texts = [[*text, int(token)] for text, token in zip(texts, drawn, strict=True)]
    began = [(text, first_steered(after, text)) for text in texts]
    windows = [text[begin : begin + 4] for text, begin in began if begin <= 7]
    assert len(windows) > 100
    assert all(b"aba" in b"".join(SPELLED[token] for token in text) for text in windows)
