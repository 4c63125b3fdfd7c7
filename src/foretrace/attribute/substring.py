"""DFAs that find substrings in the bytes of tokens, however a text is split into tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute.automaton import DFA
from foretrace.errors import InvalidInputError

MAX_BYTES = 512  # of all substrings together: each byte adds a state
MAX_BYTE_STATES = 4 * MAX_BYTES  # of the automaton over bytes, which whole words may need
MAX_ENTRIES = 1 << 24  # of the table of tokens and states that is in memory at once
MAX_FOLDED = 3  # characters that one character becomes by case folding
FIRST_CASELESS = 0x20000  # code points from here on have no case
SEPARATOR_LEADS = (0xC2, 0xE2, 0xF0)  # UTF-8 of other punctuation, of symbols and of emoji


class ByteAutomaton(NamedTuple):
    """An automaton over bytes that finds substrings. It begins in state 0.

    The last state is reached when a substring is found for certain, and is never left.
    """

    table: NDArray[np.int32]  # (S, 256): the next state
    accepting: NDArray[np.bool_]  # (S,): whether a text that ends here has a substring

    def accepts(self, text: str) -> bool:
        """Return whether one of the substrings is found in a text."""
        state = 0
        for byte in encode(text):
            state = int(self.table[state, byte])
        return bool(self.accepting[state])


def encode(text: str) -> bytes:
    """Return a text in UTF-8, with surrogates as they are."""
    return text.encode("utf-8", "surrogatepass")


def substring_dfa(
    substrings: Sequence[str],
    token_bytes: Sequence[bytes],
    *,
    whole_word: bool = False,
    ignore_case: bool = False,
) -> tuple[DFA, Tensor]:
    """Build the DFA that accepts texts with any of the substrings; return the accepting states too.

    `token_bytes` holds the bytes of every token, empty for control tokens. A substring is found
    with any split into tokens. The accepting states are (Q,) bool.
    """
    automaton = byte_automaton(substrings, whole_word=whole_word, ignore_case=ignore_case)
    byte_table = automaton.table
    numbers: dict[bytes, int] = {}  # of every distinct state map
    map_index = np.empty(len(token_bytes), dtype=np.int64)
    width = max(1, MAX_ENTRIES // len(byte_table))
    for start in range(0, len(token_bytes), width):
        chunk = slice(start, start + width)
        maps, inverse = _distinct_rows(_state_maps(byte_table, token_bytes[chunk]))
        map_numbers = [numbers.setdefault(row.tobytes(), len(numbers)) for row in maps]
        map_index[chunk] = np.array(map_numbers)[inverse]
    distinct = np.frombuffer(b"".join(numbers), dtype=np.int32).reshape(len(numbers), -1)
    dfa = DFA.from_state_maps(torch.from_numpy(distinct.copy()), torch.from_numpy(map_index))
    accepting = torch.from_numpy(automaton.accepting)
    minimized, representatives = dfa.minimized(accepting[None])
    return minimized, accepting[representatives]


def byte_automaton(
    substrings: Sequence[str], *, whole_word: bool = False, ignore_case: bool = False
) -> ByteAutomaton:
    """Build the automaton over bytes that finds any of the substrings.

    Args:
        substrings: The substrings.
        whole_word: Whether to find them only where neither neighbour is part of a word. Letters,
            digits and the underscore of ASCII are. Other characters are, unless their UTF-8 begins
            with one of SEPARATOR_LEADS. Ends of the text are not.
        ignore_case: Whether to compare whole characters after Unicode's case folding.

    Raises:
        InvalidInputError: If there is no substring, or if they are empty or too long.
    """
    if not substrings or not all(substrings):
        raise InvalidInputError("Pass one or more texts to search for, none of them empty.")
    if sum(len(encode(text)) for text in substrings) > MAX_BYTES:
        raise InvalidInputError(
            f"Texts to search for may have {MAX_BYTES} bytes together. Use fewer or shorter texts."
        )
    edges = _search_graph(substrings, ignore_case)
    return _Determinizer(edges, whole_word).automaton()


FOUND = -1  # the node after the last byte of a substring
Edges = list[dict[int, set[int]]]
"""For every node, the nodes after each byte. Substrings begin at node 0."""


def _search_graph(substrings: Sequence[str], ignore_case: bool) -> Edges:
    """Return the graph whose paths from node 0 to FOUND spell the substrings."""
    edges: Edges = [{}]

    def connect(first: int, spelled: bytes, last: int) -> None:
        for byte in spelled[:-1]:
            edges.append({})
            edges[first].setdefault(byte, set()).add(len(edges) - 1)
            first = len(edges) - 1
        edges[first].setdefault(spelled[-1], set()).add(last)

    for text in dict.fromkeys(substrings):
        if ignore_case:
            text = text.casefold()
        nodes = [0, *range(len(edges), len(edges) + len(text) - 1), FOUND]
        edges += [{} for _ in nodes[1:-1]]
        alike = _alike(text) if ignore_case else {one: [one] for one in text}
        for begin, first in enumerate(nodes[:-1]):
            for size in range(1, min(MAX_FOLDED, len(text) - begin) + 1):
                for character in alike.get(text[begin : begin + size], ()):
                    connect(first, encode(character), nodes[begin + size])
    return edges


def _alike(folded: str) -> dict[str, list[str]]:
    """Return the characters that case folding makes each part of a folded text of."""
    sizes = range(1, MAX_FOLDED + 1)
    parts = {folded[i : i + size] for size in sizes for i in range(len(folded))}
    alike = {one: [one] for one in folded if ord(one) >= FIRST_CASELESS}
    for character in map(chr, range(FIRST_CASELESS)):
        if (part := character.casefold()) in parts:
            alike.setdefault(part, []).append(character)
    return alike


class _State(NamedTuple):
    """A state of the automaton: which nodes of the graph the bytes so far lead to."""

    nodes: frozenset[int]
    in_word: bool
    """Whether the last character is part of a word; False unless whole words are wanted."""


class _Determinizer:
    """Makes an automaton of a graph, by the subset construction."""

    def __init__(self, edges: Edges, whole_word: bool) -> None:
        self.edges, self.whole_word = edges, whole_word
        in_word = [bytes([byte]).isalnum() or byte == ord("_") for byte in range(0x80)]
        in_word += [byte not in SEPARATOR_LEADS for byte in range(0x80, 0x100)]
        self.in_word = in_word
        labels = {byte for node in edges for byte in node}
        kinds = [(byte if byte in labels else -1, *self._kind(byte)) for byte in range(256)]
        self.first_of_kind = [kinds.index(kind) for kind in kinds]

    def automaton(self) -> ByteAutomaton:
        """Return the automaton of all states that can be reached."""
        numbers = {_State(frozenset(), False): 0}
        rows: list[list[int]] = []
        for state in (queue := list(numbers)):  # grows during the iteration
            targets: dict[int, int] = {}
            for byte in sorted(set(self.first_of_kind)):
                target = self._step(state, byte)
                if target is not None and target not in numbers:
                    numbers[target] = len(numbers)
                    queue.append(target)
                targets[byte] = FOUND if target is None else numbers[target]
            rows.append([targets[byte] for byte in self.first_of_kind])
            if len(numbers) > MAX_BYTE_STATES:
                raise InvalidInputError(
                    "The texts to search for overlap in too many ways. Use fewer or shorter texts."
                )
        table = np.array([*rows, [FOUND] * 256], dtype=np.int32)
        table[table == FOUND] = len(rows)
        accepting = [FOUND in state.nodes for state in numbers]
        return ByteAutomaton(table, np.array([*accepting, True]))

    def _kind(self, byte: int) -> tuple[bool, bool]:
        """Return what matters of a byte where it is no part of a substring."""
        return (self.in_word[byte], 0x80 <= byte < 0xC0) if self.whole_word else (False, False)

    def _step(self, state: _State, byte: int) -> _State | None:
        """Return the state after a byte; None if a substring is found for certain."""
        if self.whole_word and FOUND in state.nodes and not self.in_word[byte]:
            return None
        sources = state.nodes - {FOUND}
        if not state.in_word:
            sources |= {0}
        nodes = frozenset(node for one in sources for node in self.edges[one].get(byte, ()))
        if not self.whole_word:
            return None if FOUND in nodes else _State(nodes, False)
        continues = 0x80 <= byte < 0xC0  # a character of several bytes
        return _State(nodes, state.in_word if continues else self.in_word[byte])


def _distinct_rows(rows: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the distinct rows and the index of each row among them, by hashing the rows."""
    factors = np.random.default_rng(0).integers(1, 1 << 62, rows.shape[1]) * 2 + 1
    _, first, inverse = np.unique(rows @ factors, return_index=True, return_inverse=True)
    if not np.array_equal(rows[first][inverse], rows):  # a hash collision
        distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
        return distinct, inverse.reshape(-1)
    return rows[first], inverse


def _state_maps(byte_table: NDArray[np.int32], token_bytes: Sequence[bytes]) -> NDArray[np.int32]:
    """Return the state after each token from each state: (V, S)."""
    order = sorted(range(len(token_bytes)), key=lambda token: -len(token_bytes[token]))
    lengths = np.array([len(token_bytes[token]) for token in order])
    flat = np.frombuffer(b"".join(token_bytes[token] for token in order), dtype=np.uint8)
    starts = lengths.cumsum() - lengths
    states = np.tile(np.arange(len(byte_table), dtype=np.int32), (len(token_bytes), 1))
    for position in range(int(lengths.max(initial=0))):
        longer = int((lengths > position).sum())  # the longest tokens come first
        byte = flat[starts[:longer] + position]
        states[:longer] = byte_table[states[:longer], byte[:, None]]
    table = np.empty_like(states)
    table[order] = states
    return table
