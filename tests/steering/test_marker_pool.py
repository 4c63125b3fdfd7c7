"""The pool of markers: what it copies to the device."""

import torch

from foretrace.steering import Marker
from foretrace.steering.marker_pool import MarkerEntry, MarkerPool
from tiny_attributes import SPELLED

CPU = torch.device("cpu")


def test_no_marker_has_an_entry() -> None:
    assert MarkerPool(CPU).add(None) == MarkerEntry(0, 0, 1, -1)


def test_a_marker_is_copied_once_and_searched_as_on_the_host() -> None:
    pool = MarkerPool(CPU)
    for text in ("ab", "ba"):
        marker = Marker(text, SPELLED)
        entry = pool.add(marker)
        assert pool.add(Marker(text, SPELLED)) == entry
        for tokens in ([0, 1], [3], [1, 0], [1, 3], [0, 2, 1], []):
            state = 0
            for token in tokens:
                token_class = int(pool.classes.rows[entry.classes, token])
                place = entry.transitions + state * entry.num_classes + token_class
                state = int(pool.transitions.rows[place])
            assert state == pool.state_after(marker, tokens)
            spelled = b"".join(SPELLED[token] for token in tokens)
            assert (state == entry.found) == (text.encode() in spelled)
    assert pool.classes.rows.dtype == torch.int16  # one number for each token of the vocabulary


def test_a_marker_that_no_token_spells_is_never_found() -> None:
    assert MarkerPool(CPU).add(Marker("xyz", SPELLED)).found == -1
