"""Markers: strings in the generated text at which a goal begins or ends; and windows of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from foretrace.attribute.automaton import DFA
from foretrace.attribute.substring import MAX_BYTES, substring_dfa
from foretrace.errors import InvalidInputError

LAST_TOKENS = 512  # of a prompt: enough for a marker and white space after it


@dataclass(frozen=True)
class Marker:
    """A string in the generated text at which a goal begins or ends, however it is tokenized.

    `foretrace.marker` makes one. Markers are equal if their text and their tokenizer are equal.

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

    def __post_init__(self) -> None:
        if not 0 < len(self.text.encode("utf-8", "surrogatepass")) <= MAX_BYTES:
            raise InvalidInputError(f"A marker needs a text of 1 to {MAX_BYTES} bytes.")

    @property
    def key(self) -> str:
        """The string and its tokenizer, as a key of caches."""
        return f"{self.tokenizer_fingerprint} {len(self.token_bytes)} {self.text}"

    def is_suffix_of(self, token_ids: Sequence[int]) -> bool:
        """Return whether a text ends with the string, apart from white space after it."""
        size = len(self.token_bytes)
        known = [token for token in token_ids[-LAST_TOKENS:] if 0 <= token < size]
        text = b"".join(self.token_bytes[token] for token in known)
        _, found, after = text.rpartition(self.text.encode("utf-8", "surrogatepass"))
        return bool(found) and not after.strip()


class CompiledMarker(NamedTuple):
    """The automaton that finds a marker in token ids."""

    marker: Marker
    dfa: DFA
    found: int
    """The state in which the marker was found; -1 if no text of these tokens contains it."""

    @classmethod
    def of(cls, marker: Marker) -> "CompiledMarker":
        """Build the automaton of a marker, which takes up to a second."""
        dfa, accepting = substring_dfa([marker.text], marker.token_bytes)
        states = accepting.nonzero()[:, 0].tolist()
        return cls(marker, dfa, states[0] if states else -1)

    @property
    def key(self) -> str:
        """The key of the marker."""
        return self.marker.key

    @property
    def nbytes(self) -> int:
        """The size of the automaton in bytes."""
        dfa = self.dfa
        return dfa.tokens.nbytes + dfa.classes.nbytes + dfa.transitions.nbytes

    def end_of_first(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the tokens it takes to complete the marker; None if they do not."""
        state = torch.zeros(1, dtype=torch.long)
        for position, token in enumerate(tokens):
            if 0 <= token < len(self.marker.token_bytes):
                state = self.dfa.step(state, torch.tensor([token])).long()
            if int(state) == self.found:
                return position + 1
        return None


class PooledMarker(NamedTuple):
    """Where a pool has the automaton of a marker."""

    marker: Marker | None
    key: str
    classes: int
    """The row with the class of every token."""
    transitions: int
    """The first of Q * C transitions."""
    num_classes: int
    num_transitions: int
    found: int
    """The state in which the marker was found; -1 if there is no marker."""


@dataclass(frozen=True)
class Window:
    """The part of the generated text that a goal is about; by default, all of it.

    Args:
        after: The window begins with the token after the one that completes this marker. It begins
            at once if the prompt ends with the marker.
        until: The number of tokens of the window; or the marker with whose last token it ends.
    """

    after: CompiledMarker | PooledMarker | None = None
    until: int | CompiledMarker | PooledMarker | None = None

    @property
    def length(self) -> int | None:
        """The number of tokens; None if it is not fixed."""
        return self.until if isinstance(self.until, int) else None

    @property
    def ends_at_marker(self) -> bool:
        """Whether the window ends with a marker."""
        return self.until is not None and not isinstance(self.until, int)

    @property
    def is_whole(self) -> bool:
        """Whether the window is the whole text."""
        return self.after is None and self.until is None

    def begins_after(self, prompt: Sequence[int]) -> bool:
        """Return whether the window begins with the first generated token."""
        marker = None if self.after is None else self.after.marker
        return marker is None or marker.is_suffix_of(prompt)

    def span(self, prompt: Sequence[int], generated: Sequence[int]) -> slice | None:
        """Return which of the generated tokens are in the window; None if it has not begun."""
        begin: int | None = 0
        if isinstance(self.after, CompiledMarker) and not self.begins_after(prompt):
            begin = self.after.end_of_first(generated)
        if begin is None:
            return None
        if isinstance(self.until, CompiledMarker):
            length = self.until.end_of_first(generated[begin:])
        else:
            length = self.length
        return slice(begin, None if length is None else begin + length)


def require_window(after: object, until: object) -> None:
    """Check the window of a goal.

    Raises:
        InvalidInputError: If an argument has another type, or the window has no tokens.
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
