"""The disk cache: paths as text, and leases."""

from pathlib import Path

import torch

from foretrace.attribute import Attribute
from foretrace.engines.vllm.disk_cache import DiskCache
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead


def test_a_path_may_be_text(tmp_path: Path) -> None:
    hmm = HMM.random(4, 10, eos_token_id=0, seed=0)
    lookahead = Lookahead(hmm, Attribute.from_weights(torch.full((10,), 0.5)), 3)
    cache = DiskCache(str(tmp_path), 1 << 20)
    cache.write("key", lookahead)
    assert cache.has("key")
    assert torch.equal(cache.read("key", hmm, 3).tables.values, lookahead.tables.values)


def test_a_lease_is_none_without_a_table(tmp_path: Path) -> None:
    assert DiskCache(tmp_path, 1 << 20).lease("absent") is None
