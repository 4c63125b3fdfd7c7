"""DFAs that find substrings in the bytes of tokens, however a text is split into tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute.automaton import DFA
from foretrace.errors import InvalidInputError

MAX_BYTES = 512  # of all substrings together: each byte adds a state
MAX_ENTRIES = 1 << 24  # of the table of tokens and states that is in memory at once


def substring_dfa(substrings: Sequence[str], token_bytes: Sequence[bytes]) -> tuple[DFA, Tensor]:
    """Build the DFA that accepts texts with any of the substrings; return the accepting states too.

    `token_bytes` holds the bytes of every token, empty for control tokens. A substring is found
    anywhere, also within words and across tokens. The accepting states are (Q,) bool.
    """
    byte_table = byte_automaton(substrings)
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
    accepting = torch.arange(dfa.num_states) == len(byte_table) - 1
    minimized, representatives = dfa.minimized(accepting[None])
    return minimized, accepting[representatives]


def byte_automaton(substrings: Sequence[str]) -> NDArray[np.int32]:
    """Build the automaton over bytes that finds any of the substrings: (S, 256).

    It begins in state 0. The last state accepts, and is never left.
    """
    patterns = [text.encode("utf-8", "surrogatepass") for text in substrings]
    if not patterns or not all(patterns):
        raise InvalidInputError("Pass one or more texts to search for, none of them empty.")
    if sum(map(len, patterns)) > MAX_BYTES:
        raise InvalidInputError(
            f"Texts to search for may have {MAX_BYTES} bytes together. Use fewer or shorter texts."
        )
    return _aho_corasick(patterns)


def _distinct_rows(rows: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the distinct rows and the index of each row among them, by hashing the rows."""
    factors = np.random.default_rng(0).integers(1, 1 << 62, rows.shape[1]) * 2 + 1
    _, first, inverse = np.unique(rows @ factors, return_index=True, return_inverse=True)
    if not np.array_equal(rows[first][inverse], rows):  # a hash collision
        distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
        return distinct, inverse.reshape(-1)
    return rows[first], inverse


def _aho_corasick(patterns: Sequence[bytes]) -> NDArray[np.int32]:
    """Build the Aho-Corasick automaton: (S, 256). The last state accepts and absorbs."""
    children: list[dict[int, int]] = [{}]
    accepting: set[int] = set()
    for pattern in patterns:
        node = 0
        for byte in pattern:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        accepting.add(node)
    last = len(children)
    table = np.zeros((last + 1, 256), dtype=np.int32)
    table[last] = last
    suffix = [0] * last  # the node of the longest proper suffix that is a prefix of a pattern
    for node in (queue := [0]):  # breadth first: grows during the iteration
        if suffix[node] in accepting:
            accepting.add(node)
        table[node] = table[suffix[node]] if node else 0
        for byte, child in children[node].items():
            suffix[child] = int(table[suffix[node], byte]) if node else 0
            table[node, byte] = child
            queue.append(child)
    for node in accepting:
        table[table == node] = last
        table[node] = last
    return table


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
