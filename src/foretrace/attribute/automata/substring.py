"""Texts as automata: whether they occur in what tokens spell, however they are cut into tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute.automata.dfa import Automaton
from foretrace.errors import InvalidInputError

MOST_BYTES = 512  # of all texts together: each is a state
AT_ONCE = 1 << 24  # moves of tokens that are held in memory


def occurrence(texts: Sequence[str], spelled: Sequence[bytes]) -> tuple[Automaton, Tensor]:
    """Make an automaton, and tell in which of its states any of the texts has occurred: (Q,) bool.

    `spelled` is what each token stands for in a text: nothing, for those that control it. Texts
    are found wherever they are, also within words, and across tokens.
    """
    patterns = [text.encode("utf-8", "surrogatepass") for text in texts]
    if not patterns or not all(patterns):
        raise InvalidInputError("Give a text, of one character or more, that is to occur or not.")
    if sum(map(len, patterns)) > MOST_BYTES:
        raise InvalidInputError(f"Texts that must occur or not have {MOST_BYTES} bytes at most.")
    bytewise = _aho_corasick(patterns)
    known: dict[bytes, int] = {}
    owner = np.empty(len(spelled), dtype=np.int64)
    width = max(1, AT_ONCE // len(bytewise))
    for start in range(0, len(spelled), width):
        part = slice(start, start + width)
        rows, own = _distinct(_through(bytewise, spelled[part]))
        place = [known.setdefault(row.tobytes(), len(known)) for row in rows]
        owner[part] = np.array(place)[own]
    distinct = np.frombuffer(b"".join(known), dtype=np.int32).reshape(len(known), -1)
    whole = Automaton.from_rows(torch.from_numpy(distinct.copy()), torch.from_numpy(owner))
    occurred = torch.arange(whole.num_states) == len(bytewise) - 1
    automaton, first = whole.merged(occurred[None])
    return automaton, occurred[first]


def _distinct(rows: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Find the rows that differ, and which of them each is: by a hash, and looked at again."""
    odd = np.random.default_rng(0).integers(1, 1 << 62, rows.shape[1]) * 2 + 1
    _, first, own = np.unique(rows @ odd, return_index=True, return_inverse=True)
    if not np.array_equal(rows[first][own], rows):  # two have one hash: it hardly ever happens
        distinct, own = np.unique(rows, axis=0, return_inverse=True)
        return distinct, own.reshape(-1)
    return rows[first], own


def _aho_corasick(patterns: Sequence[bytes]) -> NDArray[np.int32]:
    """Where each byte leads from each state: (S, 256). The last state is never left."""
    children: list[dict[int, int]] = [{}]
    final: set[int] = set()
    for pattern in patterns:
        node = 0
        for byte in pattern:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        final.add(node)
    last = len(children)
    moves = np.zeros((last + 1, 256), dtype=np.int32)
    moves[last] = last
    suffix = [0] * last  # the longest end of a state's text that also begins one
    for node in (queue := [0]):  # by length: grows while it is read
        found = node in final or suffix[node] in final
        if found:
            final.add(node)
        moves[node] = moves[suffix[node]] if node else 0
        for byte, child in children[node].items():
            suffix[child] = int(moves[suffix[node], byte]) if node else 0
            moves[node, byte] = child
            queue.append(child)
    for node in final:
        moves[moves == node] = last
        moves[node] = last
    return moves


def _through(bytewise: NDArray[np.int32], spelled: Sequence[bytes]) -> NDArray[np.int32]:
    """Read every token's bytes from every state: (V, S)."""
    order = sorted(range(len(spelled)), key=lambda token: -len(spelled[token]))
    lengths = np.array([len(spelled[token]) for token in order])
    flat = np.frombuffer(b"".join(spelled[token] for token in order), dtype=np.uint8)
    starts = lengths.cumsum() - lengths
    states = np.tile(np.arange(len(bytewise), dtype=np.int32), (len(spelled), 1))
    for position in range(int(lengths.max(initial=0))):
        longer = int((lengths > position).sum())  # the first so many, by their order
        byte = flat[starts[:longer] + position]
        states[:longer] = bytewise[states[:longer], byte[:, None]]
    table = np.empty_like(states)
    table[order] = states
    return table
