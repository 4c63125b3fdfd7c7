"""Windows: which tokens a goal is about, exactly, and that all others are left alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.attribute.evidence import Evidence
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal, Marker, PrefixTracker, Request, SlotSteering
from foretrace.steering.merge_goals import merge_goals
from foretrace.steering.window import Window, WindowState
from goals import plain_goal
from steering.test_batch import LENGTH, steered_log_probabilities
from tiny import TOKENS, all_texts, tiny_hmm
from tiny_attributes import SPELLED, attributes

B, BA, C = (Marker(text, SPELLED) for text in ("b", "ba", "c"))
WINDOWS = [
    Window(B),  # of one token, or the end of one
    Window(BA),  # of two tokens, or the end of one and the beginning of the next
    Window(B, 1),
    Window(BA, 2),
    Window(None, 2),
    Window(B, LENGTH + 1),  # longer than the text
]


def goal_in(window: Window, lookahead: Lookahead) -> Goal:
    return replace(plain_goal(lookahead), after=window.after, window=window.until)


def first_steered(window: Window, text: list[int]) -> int:
    """Find the first token of the window in the text's bytes."""
    if window.after is None:
        return 0
    wanted = window.after.text.encode()
    for count in range(len(text) + 1):
        if wanted in b"".join(SPELLED[token] for token in text[:count]):
            return count
    return len(text)


def expected_probabilities(hmm: HMM, attribute: Attribute, window: Window) -> Tensor:
    """Return p(what precedes the window) p(x) a(window) / Z of every text, by enumeration."""
    texts = all_texts(LENGTH)
    probability = hmm.log_likelihood(texts).exp()
    probability = torch.where(hmm.log_likelihood(texts) > -60, probability, 0.0)
    min_tokens = Lookahead(hmm, attribute, 0).min_tokens
    weighted, before = probability.clone(), []
    for row, text in enumerate(texts.tolist()):
        begin = first_steered(window, text)
        tokens = [token for token in text[begin:] if token not in hmm.config.eos_token_ids]
        if window.length is not None:
            end = begin + window.length
            tokens = [t for t in text[begin:end] if t not in hmm.config.eos_token_ids]
        if begin + min_tokens <= LENGTH and begin < LENGTH:
            weighted[row] *= attribute.probability([tokens])[0]
        before.append(tuple(text[:begin]))
    index = {prefix: number for number, prefix in enumerate(dict.fromkeys(before))}
    group = torch.tensor([index[prefix] for prefix in before])
    sums = torch.zeros(2, len(index), dtype=torch.float64)
    sums.index_add_(1, group, torch.stack([probability, weighted]))
    return torch.where(weighted > 0, weighted * (sums[0] / sums[1])[group], 0.0)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["one", "all", "must not", "weighed and must"])
@pytest.mark.parametrize("form", ["dense", "eos"])
def test_a_window_follows_the_exact_posterior(form: str, name: str, window: Window) -> None:
    """Also if texts end within it; what precedes and follows it, given it, is as without a goal."""
    hmm, attribute = tiny_hmm(form), attributes()[name]
    lookahead = Lookahead(hmm, attribute, LENGTH)
    if window.length is not None and window.length < lookahead.min_tokens:
        with pytest.raises(InvalidInputError, match="Raise the limit, or the goal's window"):
            Request((goal_in(window, lookahead),), (), LENGTH)
        return
    expected = expected_probabilities(hmm, attribute, window)
    steered = steered_log_probabilities(hmm, (goal_in(window, lookahead),)).exp()
    assert float(expected.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(
        torch.where(expected > 0, steered, 0.0), expected, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("after", [None, B])
def test_a_window_that_ends_at_a_marker_is_steered_up_to_it(after: Marker | None) -> None:
    """Up to the marker as if there were no end; from then on not at all."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["all"], LENGTH)
    ended, endless = (
        Request((goal_in(Window(after, until), lookahead),), (), 9) for until in (BA, None)
    )
    texts = [list(text) for n in range(LENGTH) for text in itertools.product(range(4), repeat=n)]
    logits, steered = torch.zeros(len(texts), TOKENS, dtype=torch.float64), []
    for request in (ended, endless):
        tracker = PrefixTracker(hmm)
        tracker.step([request] * len(texts), texts)
        steered.append(tracker.reweight(logits))
    for row, text in enumerate(texts):
        begin = first_steered(Window(after), text)
        spelled = b"".join(SPELLED[token] for token in text[begin:])
        if b"ba" in spelled:
            assert torch.equal(steered[0][row], logits[row])
        else:
            torch.testing.assert_close(steered[0][row], steered[1][row])


def test_rows_outside_their_window_keep_every_bit() -> None:
    """Beside rows that are steered, and with logits that arithmetic would change."""
    hmm = tiny_hmm("dense").to(dtype=torch.float32)
    lookahead = Lookahead(hmm, attributes()["weighed and must"], 8)
    windows = [Window(), Window(B), Window(B), Window(B, 3), Window(None, 3), Window(C, BA)]
    texts = [[0], [0, 2], [0, 1], [1, 0, 0, 0], [0, 0, 0], [2, 3, 0]]
    constrained = [False, False, False, True, True, False]
    weighed = Lookahead(hmm, attributes()["one"], 8)
    requests = [
        Request((goal_in(window, lookahead if constraint else weighed),), (2,), 12)
        for window, constraint in zip(windows, constrained, strict=True)
    ]
    observed: list[tuple[Tensor, Tensor]] = []
    tracker = PrefixTracker(hmm, observe=lambda *step: observed.append(step))
    tracker.step(requests, texts)
    logits = torch.tensor([[-0.0, 1e-30, torch.inf, -torch.inf, torch.nan, 1e30]] * len(texts))
    logits[[0, 2]] = torch.randn(2, 6)
    steered = tracker.reweight(logits)
    untouched = [1, 3, 4, 5]
    assert torch.equal(steered[untouched].view(torch.int32), logits[untouched].view(torch.int32))
    assert (steered[[0, 2], :TOKENS] != logits[[0, 2], :TOKENS]).any(1).all()
    ((prices, is_steered),) = observed
    assert is_steered.nonzero()[:, 0].tolist() == [0, 2]
    assert prices.nonzero()[:, 0].tolist() == [0, 2]


def _states_of(hmm: HMM, request: Request, text: list[int]) -> tuple[PrefixTracker, PrefixTracker]:
    """Return trackers that advanced token by token, and that read the text at once."""
    advanced, read = PrefixTracker(hmm), PrefixTracker(hmm)
    for end in range(len(text) + 1):
        advanced.step([request], [text[:end]])
    read.step([request], [text])
    return advanced, read


@pytest.mark.parametrize("window", [*WINDOWS, Window(B, BA), Window(None, B)])
@pytest.mark.parametrize("once", [False, True])
def test_states_can_be_rebuilt_from_the_tokens(window: Window, once: bool) -> None:
    """After preemption; alone as in a batch of rows with other windows."""
    hmm = tiny_hmm("dense")
    rewards = Evidence(
        0.0, torch.arange(2).int(), torch.tensor([1.0, -2.0]).double(), first_only=once
    )
    evidence = Attribute(attributes()["nothing to weigh"].terms, evidence=(rewards,))
    request = Request((goal_in(window, Lookahead(hmm, evidence, 8)),), (1, 2), 12)
    other = Request((goal_in(Window(C, 2), Lookahead(hmm, attributes()["one"], 8)),), (1,), 12)
    logits = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(0)).double()
    for text in all_texts(5).tolist()[::17]:
        advanced, read = _states_of(hmm, request, text)
        alone = advanced.reweight(logits[:1])
        torch.testing.assert_close(read.reweight(logits[:1]), alone)
        states = [tracker.steering.state for tracker in (advanced, read)]
        assert torch.equal(states[0].numbers, states[1].numbers)
        together = PrefixTracker(hmm)
        together.step([request, other], [text, text])
        torch.testing.assert_close(together.reweight(logits)[:1], alone)


@pytest.mark.parametrize(
    ("prompt", "at_once"),
    [("</t>", True), ("x</t> \n", True), ("</t>x", False), ("", False), ("</t", False)],
)
def test_a_prompt_that_ends_with_the_marker_begins_the_window(prompt: str, at_once: bool) -> None:
    alphabet = [bytes([value]) for value in range(256)]
    window = Window(Marker("</t>", alphabet), 3)
    state = window.start(list(prompt.encode()))
    assert state == (WindowState(0, 0, 3) if at_once else WindowState())
    assert window.read([], list(b"yes</t>no")) == WindowState(0, 7, 10)


def test_white_space_can_be_a_marker() -> None:
    paragraph = Marker("\n\n", [b"x", b"\n", b"\n\n", b"\n\n\n "])
    assert [paragraph.ends(ids) for ids in ([0], [1], [1, 1], [0, 2], [3], [3, 0], [2, 9])] == [
        *(False, False, True, True, True, False, True)
    ]


def test_a_marker_that_comes_too_late_begins_nothing() -> None:
    """The required text takes two tokens, and one is left: nothing is forbidden."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["must"], 8)  # a, b, a; ab, a; ab, ab
    request = Request((goal_in(Window(C), lookahead),), (), 4)
    logits = torch.zeros(3, TOKENS, dtype=torch.float64)
    tracker = PrefixTracker(hmm)
    tracker.step([request] * 3, [[0, 0, 2], [0, 2], [0, 2, 3]])
    steered = tracker.reweight(logits)
    assert steered[0].tolist() == [0.0] * TOKENS
    assert steered[1].isfinite().tolist() == [False, False, False, True]
    assert steered[2].isfinite().tolist() == [True, False, False, True]


def test_the_promise_is_for_the_window() -> None:
    """What must occur occurs after the marker and within the window, and not only before it."""
    hmm = tiny_hmm("dense")
    goal = goal_in(Window(C, 4), Lookahead(hmm, attributes()["must"], 8))
    request, tracker = Request((goal,), (), 9), PrefixTracker(hmm)
    random = torch.Generator().manual_seed(0)
    texts: list[list[int]] = [[]] * 200
    for _ in range(9):
        tracker.step([request] * 200, texts)
        drawn = torch.multinomial(
            tracker.reweight(torch.randn(200, TOKENS, generator=random)).softmax(-1),
            1,
            generator=random,
        )
        texts = [[*text, int(token)] for text, token in zip(texts, drawn, strict=True)]
    began = [(text, first_steered(Window(C), text)) for text in texts]
    steered = [text[begin : begin + 4] for text, begin in began if begin <= 7]
    assert len(steered) > 100
    assert all(b"aba" in b"".join(SPELLED[token] for token in text) for text in steered)


def test_goals_of_one_text_have_one_window() -> None:
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["one"], 8)
    same = [goal_in(Window(Marker("b", SPELLED), 3), lookahead) for _ in range(2)]
    (merged,) = merge_goals(same)
    assert (merged.after, merged.window) == (B, 3)
    other = goal_in(Window(B, 4), lookahead)
    for refused in (
        lambda: merge_goals([same[0], other]),
        lambda: Request((same[0], other), (), 9),
    ):
        with pytest.raises(InvalidInputError, match="the same `after` and the same `window`"):
            refused()
    assert Request((), (), 9).window == Window()


def test_required_text_needs_an_end_that_is_known() -> None:
    hmm = tiny_hmm("dense")
    for name, refused in (("must", True), ("either", True), ("must not", False), ("one", False)):
        goal = goal_in(Window(None, C), Lookahead(hmm, attributes()[name], 8))
        if refused:
            with pytest.raises(InvalidInputError, match="the marker may come before the text"):
                Request((goal,), (), 9)
        else:
            Request((goal,), (), 9)


def test_what_is_no_marker_and_no_window_is_refused() -> None:
    lookahead = Lookahead(tiny_hmm("dense"), attributes()["one"], 8)
    with pytest.raises(InvalidInputError, match=r"foretrace.marker\('</think>', tokenizer\)"):
        Goal(lookahead, 1.0, after="</think>")  # type: ignore[arg-type]
    for window in (0, -1, True, 2.5, "c"):
        with pytest.raises(InvalidInputError, match="marker"):
            Goal(lookahead, 1.0, window=window)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="must be a marker"):
        Goal(lookahead, 1.0, after=64)  # type: ignore[arg-type]


def test_the_filter_reads_tokens_before_the_window() -> None:
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["one"], 8)
    request = Request((goal_in(Window(B), lookahead),), (0,), 9)
    steering = SlotSteering(hmm)
    steering.read_generated([0], [request], [[0, 0, 1]])
    torch.testing.assert_close(steering.state.predicted, lookahead.predicted([0, 0, 0, 1]))
    assert float(steering.state.log_past[0]) == 0.0
