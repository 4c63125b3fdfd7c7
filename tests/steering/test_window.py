"""Windows: where they begin and end, and that everything outside of them is left alone."""

import pytest
import torch

from foretrace.hmm import HMM
from foretrace.steering import Compiler, Goal, Marker, Request, Steering
from foretrace.steering.markers import CompiledMarker, Window
from goals import compiled, steer
from steering.test_oracle import goals
from tiny import TOKENS, all_texts, tiny_hmm
from tiny_attributes import SPELLED, attributes

B, BA, C = (Marker(text, SPELLED) for text in ("b", "ba", "c"))
WINDOWS = [(B, None), (BA, None), (B, 1), (BA, 2), (None, 2), (B, 9), (B, BA), (None, B)]


def request_in(
    hmm: HMM, name: str, after: Marker | None, until: int | Marker | None, limit: int = 12
) -> Request:
    row = [Goal(goal.attribute, goal.strength, after=after, window=until) for goal in goals()[name]]
    return Request(Compiler(hmm, 8).compile(row), (1, 2), limit)


def test_rows_outside_their_window_keep_every_bit() -> None:
    """Beside rows that are steered, and with logits that arithmetic would change."""
    hmm = tiny_hmm("dense").to(dtype=torch.float32)
    cases = [
        ("one", None, None, [0]),
        ("one", B, None, [0, 2]),
        ("one", B, None, [0, 1]),
        ("weighed and must", B, 3, [1, 0, 0, 0]),
        ("weighed and must", None, 3, [0, 0, 0]),
        ("one", C, BA, [2, 3, 0]),
    ]
    steering = Steering(hmm)
    steering.start(
        {row: request_in(hmm, *case[:3]) for row, case in enumerate(cases)},
        {row: case[3] for row, case in enumerate(cases)},
    )
    logits = torch.tensor([[-0.0, 1e-30, torch.inf, -torch.inf, torch.nan, 1e30]] * len(cases))
    logits[[0, 2]] = torch.randn(2, 6)
    steered = logits.clone()
    prices = steering.reweight_(steered, [*range(len(cases))], measure=True)
    untouched = [1, 3, 4, 5]
    assert torch.equal(steered[untouched].view(torch.int32), logits[untouched].view(torch.int32))
    assert (steered[[0, 2], :TOKENS] != logits[[0, 2], :TOKENS]).any(1).all()
    assert prices is not None
    assert prices.is_steered.nonzero()[:, 0].tolist() == [0, 2]
    assert prices.nats.nonzero()[:, 0].tolist() == [0, 2]


@pytest.mark.parametrize(("after", "until"), WINDOWS)
@pytest.mark.parametrize("name", ["evidence", "all"])
def test_states_can_be_rebuilt_from_the_tokens(
    name: str, after: Marker | None, until: int | Marker | None
) -> None:
    """After preemption; and the host finds the same window in the text."""
    hmm = tiny_hmm("dense")
    request = request_in(hmm, name, after, until)
    assert request.goal is not None
    logits = torch.randn(1, TOKENS, generator=torch.Generator().manual_seed(0)).double()
    for text in all_texts(5).tolist()[::17]:
        advanced = Steering(hmm)
        advanced.start({0: request})
        for token in text:
            advanced.advance([0], torch.tensor([token]))
        found = logits.clone()
        prices = advanced.reweight_(found, [0], measure=True)
        torch.testing.assert_close(found, steer(hmm, [request], [text], logits))
        span = request.goal.window.span((1, 2), text)
        inside = span is not None and span.start <= 5 < (span.stop or 99)
        assert prices is not None
        assert prices.is_steered.tolist() == [inside]


def test_a_window_that_ends_at_a_marker_is_steered_up_to_it() -> None:
    """Up to the marker as if there were no end; from then on not at all."""
    hmm = tiny_hmm("dense")
    ended, endless = (request_in(hmm, "all", B, until, 9) for until in (BA, None))
    texts = all_texts(4).tolist()
    logits = torch.zeros(len(texts), TOKENS, dtype=torch.float64)
    steered = [steer(hmm, [one] * len(texts), texts, logits) for one in (ended, endless)]
    for row, text in enumerate(texts):
        spelled = b"".join(SPELLED[token] for token in text)
        begin = spelled.find(b"b") + 1
        if begin and b"ba" in b"".join(SPELLED[token] for token in text[1:])[begin:]:
            continue  # tokens of several letters: `test_states_can_be_rebuilt` covers them
        if begin and b"ba" not in spelled[begin:]:
            torch.testing.assert_close(steered[0][row], steered[1][row])


@pytest.mark.parametrize(
    ("prompt", "at_once"),
    [("</t>", True), ("x</t> \n", True), ("</t>x", False), ("", False), ("</t", False)],
)
def test_a_prompt_that_ends_with_the_marker_begins_the_window(prompt: str, at_once: bool) -> None:
    alphabet = [bytes([value]) for value in range(256)]
    window = Window(CompiledMarker.of(Marker("</t>", alphabet)), 3)
    assert window.begins_after(list(prompt.encode())) == at_once
    assert window.span(list(prompt.encode()), list(b"yes</t>no")) == (
        slice(0, 3) if at_once else slice(7, 10)
    )


def test_white_space_can_be_a_marker() -> None:
    paragraph = Marker("\n\n", [b"x", b"\n", b"\n\n", b"\n\n\n "])
    texts = ([0], [1], [1, 1], [0, 2], [3], [3, 0], [2, 9])
    found = [paragraph.is_suffix_of(ids) for ids in texts]
    assert found == [False, False, True, True, True, False, True]


def test_a_marker_that_no_token_spells_is_never_found() -> None:
    marker = CompiledMarker.of(Marker("xyz", SPELLED))
    assert marker.found == -1
    assert marker.end_of_first([0, 1, 2, 3] * 5) is None
    request = request_in(tiny_hmm("dense"), "one", Marker("xyz", SPELLED), None)
    logits = torch.randn(1, TOKENS)
    assert torch.equal(steer(tiny_hmm("dense"), [request], [[0, 1]], logits), logits)


def test_the_filter_reads_tokens_before_the_window() -> None:
    hmm = tiny_hmm("dense")
    steering, other = Steering(hmm), Steering(hmm)
    steering.start({0: request_in(hmm, "one", B, None)}, {0: [0, 0, 1]})
    other.start({0: Request(compiled(hmm, attributes()["one"], 8), (1, 2, 0, 0, 1), 9)})
    torch.testing.assert_close(steering.state.predicted, other.state.predicted)
    assert float(steering.state.log_past[0]) == 0.0
