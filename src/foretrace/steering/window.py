"""Which of the generated tokens a goal is about: the tokens after a marker, within a window."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor

from foretrace.attribute.substring import byte_automaton
from foretrace.errors import InvalidInputError

T = TypeVar("T", list[int], Tensor)


@dataclass(frozen=True)
class Marker:
    """A string in the generated text at which a goal begins or ends, however it is tokenized.

    `foretrace.marker` makes one. Markers are equal if their text and their tokenizer are.

    Args:
        text: The string. Case matters.
        token_bytes: The bytes of each token. Special tokens have the bytes of their content.
        tokenizer_fingerprint: The fingerprint of the tokenizer.

    Raises:
        InvalidInputError: If the string is empty or too long.
    """

    text: str
    token_bytes: Sequence[bytes] = field(repr=False, compare=False)
    tokenizer_fingerprint: str | None = None
    _transitions: list[list[int]] = field(init=False, repr=False, compare=False)  # (states, 256)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_transitions", byte_automaton([self.text]).tolist())

    def step(self, state: int, token: int) -> int:
        """Return the state of the search after a token; it begins with state 0."""
        for byte in self._bytes(token):
            state = self._transitions[state][byte]
        return state

    def is_found(self, state: int) -> bool:
        """Return whether the string occurred before this state."""
        return state == len(self._transitions) - 1

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether a text ends with the string, apart from white space after it."""
        text, marker = b"".join(map(self._bytes, token_ids)), self.text.encode()
        _, found, after = text.rpartition(marker)
        return bool(found) and not after.strip()

    def _bytes(self, token: int) -> bytes:
        return self.token_bytes[token] if 0 <= token < len(self.token_bytes) else b""


class WindowState(NamedTuple):
    """How far a window is: plain integers, which can be recomputed from the token ids."""

    marker_state: int = 0
    """The state of the search for the next marker."""
    begin: int | None = None
    """The number of generated tokens before the window; None if it has not begun."""
    end: int | None = None
    """The number of generated tokens up to the end of the window; None if that is not known."""

    def covers(self, position: int) -> bool:
        """Return whether the window covers the generated token at a position, from 0."""
        began = self.begin is not None and self.begin <= position
        return began and (self.end is None or position < self.end)

    def select(self, generated: T) -> T:
        """Return those of the generated tokens that the window covers."""
        return generated[:0] if self.begin is None else generated[self.begin : self.end]


@dataclass(frozen=True)
class Window:
    """The part of the generated text that a goal is about; by default, all of it.

    Args:
        after: The window begins with the token after the one that completes this marker. It begins
            at once if the prompt ends with the marker.
        until: The number of tokens of the window; or the marker with whose last token it ends.
    """

    after: Marker | None = None
    until: int | Marker | None = None

    @property
    def length(self) -> int | None:
        """The number of tokens; None if it is not fixed."""
        return self.until if isinstance(self.until, int) else None

    @property
    def has_marker(self) -> bool:
        """Whether the window depends on the generated tokens, not only on their number."""
        return self.after is not None or isinstance(self.until, Marker)

    def pending(self, state: WindowState) -> Marker | None:
        """Return the marker that is searched for in the next token; None if there is none."""
        if state.begin is None:
            return self.after
        return self.until if isinstance(self.until, Marker) and state.end is None else None

    def start(self, prompt: Sequence[int]) -> WindowState:
        """Return the state before the first generated token.

        Args:
            prompt: Token ids of the prompt. They are not used unless the window has `after`.
        """
        at_once = self.after is None or self.after.ends(prompt)
        return self._begun(0) if at_once else WindowState()

    def advance(self, state: WindowState, token: int, num_generated: int) -> WindowState:
        """Return the state after a token, which makes the text `num_generated` tokens long."""
        marker = self.pending(state)
        if marker is None:
            return state
        marker_state = marker.step(state.marker_state, token)
        if not marker.is_found(marker_state):
            return state._replace(marker_state=marker_state)
        return (
            self._begun(num_generated) if state.begin is None else state._replace(end=num_generated)
        )

    def read(self, prompt: Sequence[int], generated: Sequence[int]) -> WindowState:
        """Return the state after a whole text."""
        state = self.start(prompt)
        for position, token in enumerate(generated):
            if self.pending(state) is None:
                break
            state = self.advance(state, token, position + 1)
        return state

    def _begun(self, begin: int) -> WindowState:
        return WindowState(0, begin, None if self.length is None else begin + self.length)


def require_window(after: object, until: object) -> Window:
    """Check the arguments of a goal, and return its window.

    Raises:
        InvalidInputError: If one of them has another type, or the window has no tokens.
    """
    if isinstance(after, str) or isinstance(until, str):
        text = after if isinstance(after, str) else until
        raise InvalidInputError(
            f"A marker depends on the tokenizer. Instead of {text!r}, pass "
            f"foretrace.marker({text!r}, tokenizer)."
        )
    if not (after is None or isinstance(after, Marker)):
        raise InvalidInputError(f"`after` must be a marker, not {after!r}.")
    is_count = isinstance(until, int) and not isinstance(until, bool) and until > 0
    if not (until is None or isinstance(until, Marker) or is_count):
        raise InvalidInputError(
            f"`window` must be a number of tokens, 1 or more, or a marker, not {until!r}."
        )
    return Window(after, until)  # type: ignore[arg-type]
