"""The cache that appends in place holds what transformers' own holds."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache

from foretrace.engines.transformers import batch as module


def growing_cache() -> Any:
    """Return an empty cache; the types of transformers allow layers without keys."""
    return module.growing_cache()


def append(cache: Any, rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Append random keys and values to two layers; return those of the second layer."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.empty(0)
    for layer in range(2):
        new = torch.randn(2, rows, 3, tokens, 4, generator=generator)
        both = torch.stack(cache.update(new[0], new[1], layer))
    return both


def test_it_holds_what_a_dynamic_cache_holds() -> None:
    """Also after the batch has changed, as in sampling, beam search and speculative decoding."""
    ours, theirs = growing_cache(), DynamicCache()
    changes: dict[int, Callable[[Any], None]] = {
        2: lambda cache: cache.batch_repeat_interleave(3),
        4: lambda cache: cache.reorder_cache(torch.tensor([5, 0, 0, 1, 2, 3])),
        6: lambda cache: cache.crop(-2),
        8: lambda cache: cache.batch_select_indices(torch.tensor([4, 1])),
    }
    rows = 2
    for step in range(12):
        if step in changes:
            changes[step](ours)
            changes[step](theirs)
            rows = ours.layers[0].keys.shape[0]
        tokens = 5 if step == 0 else 1
        assert torch.equal(append(ours, rows, tokens, step), append(theirs, rows, tokens, step))
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_step_copies_nothing_until_the_memory_is_full() -> None:
    cache, places = growing_cache(), []
    append(cache, 2, 8, 0)
    for step in range(1, 25):
        append(cache, 2, 1, step)
        places.append(cache.layers[1].keys.data_ptr())
    assert len(set(places)) == 2  # memory for 16 tokens, then for 32


def test_copies_are_independent() -> None:
    cache = growing_cache()
    append(cache, 2, 3, 0)
    append(cache, 2, 1, 1)
    copied = deepcopy(cache)
    before = append(cache, 2, 1, 2).clone()
    append(copied, 2, 1, 3)
    layer = cache.layers[1]
    assert torch.equal(torch.stack([layer.keys, layer.values]), before)
