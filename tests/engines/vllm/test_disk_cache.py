"""The disk cache: its directory, its budget, and leases."""

import fcntl
import os
from pathlib import Path

import pytest
import torch

from foretrace.attribute import Attribute
from foretrace.engines.vllm import disk_cache
from foretrace.engines.vllm.disk_cache import LOW_WATER, DiskCache
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.lookahead.tables import Tables

HORIZON, TOKENS = 3, 10
TINY = HMM.random(4, TOKENS, eos_token_id=0, seed=0)


def lookahead() -> Lookahead:
    return Lookahead(TINY, Attribute.from_weights(torch.full((TOKENS,), 0.5)), HORIZON)


def table_size() -> int:
    """Return the bytes of a table in memory, which `write` makes room for."""
    return sum(tensor.nbytes for tensor in lookahead().tables)


def entry_size(folder: Path) -> int:
    """Return the bytes of a table and its attribute on the disk."""
    cache = DiskCache(folder / "size", 1 << 20)
    cache.write("key", lookahead())
    return sum(path.stat().st_size for path in cache.folder.iterdir())


def filled(folder: Path, budget: int, count: int) -> DiskCache:
    """Return a cache with tables `0`, `1`, ..., of which the first was used first."""
    cache = DiskCache(folder / "filled", 1 << 20)
    for key in range(count):
        cache.write(str(key), lookahead())
        os.utime(cache.folder / f"{key}.table", (key, key))
    return DiskCache(folder / "filled", budget)


def keys(cache: DiskCache) -> list[str]:
    return sorted(path.stem for path in cache.folder.glob("*.table"))


def test_a_path_may_be_text(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 1 << 20)
    cache.write("key", lookahead())
    assert cache.has("key")
    assert torch.equal(cache.read("key", TINY, HORIZON).tables.values, lookahead().tables.values)


def test_a_lookahead_that_was_read_has_the_tables_of_the_file(tmp_path: Path) -> None:
    """They are not computed again, which takes seconds."""
    cache, built = DiskCache(tmp_path, 1 << 20), lookahead()
    marked = Tables(built.tables.values / 2, built.tables.log_scales - 1)
    cache.write("key", Lookahead(TINY, built.attribute, HORIZON, tables=marked))
    read = cache.read("key", TINY, HORIZON)
    assert read.horizon == HORIZON
    assert torch.equal(read.tables.values, marked.values)
    assert torch.equal(read.tables.log_scales, marked.log_scales)


@pytest.mark.parametrize(("name", "value"), [("values", 1.5), ("values", -0.5), ("log_scales", 1)])
def test_a_damaged_table_is_named(tmp_path: Path, name: str, value: float) -> None:
    cache, built = DiskCache(tmp_path, 1 << 20), lookahead()
    tables = built.tables._replace(**{name: torch.full_like(getattr(built.tables, name), value)})
    if name == "log_scales":
        tables = tables._replace(log_scales=tables.log_scales / 0)
    cache.write("key", Lookahead(TINY, built.attribute, HORIZON, tables=tables))
    with pytest.raises(InvalidFileError, match=r"key\.table is damaged"):
        cache.read("key", TINY, HORIZON)


def test_a_table_of_another_horizon_is_refused(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    cache.write("key", lookahead())
    with pytest.raises(InvalidFileError, match=r"key\.table"):
        cache.read("key", TINY, HORIZON + 1)


def test_a_lease_is_none_without_a_table(tmp_path: Path) -> None:
    assert DiskCache(tmp_path, 1 << 20).lease("absent") is None


def test_a_lease_is_none_if_the_table_is_evicted_before_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, lock, opened = DiskCache(tmp_path, 1 << 20), fcntl.flock, []
    cache.write("key", lookahead())

    def evict_first(descriptor: int, operation: int) -> None:
        (cache.folder / "key.table").unlink()
        lock(descriptor, operation)
        opened.append(descriptor)

    monkeypatch.setattr(fcntl, "flock", evict_first)
    assert cache.lease("key") is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_tables_up_to_the_budget_are_kept(tmp_path: Path) -> None:
    exact = 2 * entry_size(tmp_path) + table_size()
    cache = filled(tmp_path, exact, 2)
    cache.write("new", lookahead())
    assert keys(cache) == ["0", "1", "new"]


def test_the_tables_used_first_are_evicted_with_their_attributes(tmp_path: Path) -> None:
    """Down to the low-water mark: of five, three may stay beside the new one, and no fourth."""
    size, new = entry_size(tmp_path), table_size()
    budget = int((3 * size + new) / LOW_WATER) + 1
    cache = filled(tmp_path, budget, 5)
    os.utime(cache.folder / "0.table", (9, 9))
    cache.write("new", lookahead())
    assert keys(cache) == ["0", "3", "4", "new"]
    assert sorted(path.stem for path in cache.folder.glob("*.attribute")) == keys(cache)


def test_eviction_stops_at_the_low_water_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "LOW_WATER", 0.5)
    cache = filled(tmp_path, 2 * (2 * entry_size(tmp_path) + table_size()), 5)
    cache.write("new", lookahead())
    assert keys(cache) == ["3", "4", "new"]  # exactly half of the budget


def test_a_leased_table_is_not_evicted(tmp_path: Path) -> None:
    exact = entry_size(tmp_path) + table_size()
    cache = filled(tmp_path, exact, 3)
    lease = cache.lease("0")
    assert lease is not None
    cache.write("new", lookahead())  # the leased one and the new one fit exactly
    assert keys(cache) == ["0", "new"]
    smaller = DiskCache(tmp_path / "filled", exact - 1)
    with pytest.raises(InvalidInputError, match=r"A table of 0 MB does not fit .* of 0 MB"):
        smaller.write("more", lookahead())
    lease.release()
    lease.release()
    smaller.write("more", lookahead())
    assert keys(cache) == ["more"]


def test_a_refusal_names_the_sizes_in_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, 3 << 20)
    monkeypatch.setattr(cache, "_by_age", lambda: iter([(0.0, 2 << 20, tmp_path / "leased")]))
    with pytest.raises(InvalidInputError, match=r"A table of 1 MB does not fit .* of 3 MB"):
        cache._make_room((1 << 20) + 1)


def test_a_table_without_its_attribute_does_not_count(tmp_path: Path) -> None:
    """Another process may delete both between two looks."""
    cache = filled(tmp_path, 1 << 20, 2)
    (cache.folder / "0.attribute").unlink()
    assert [path.stem for _, _, path in cache._by_age()] == ["1"]


def test_the_directory_is_private(tmp_path: Path) -> None:
    folder = DiskCache(tmp_path / "deep" / "path", 1 << 20).folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_read_is_used(tmp_path: Path) -> None:
    folder = DiskCache(tmp_path, 1 << 20).folder
    folder.chmod(0o755)
    assert DiskCache(tmp_path, 1 << 20).folder == folder


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    DiskCache(tmp_path, 1 << 20).folder.chmod(mode)
    with pytest.raises(InvalidInputError, match="others can write to it"):
        DiskCache(tmp_path, 1 << 20)


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    folder = DiskCache(tmp_path, 1 << 20).folder
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match="belongs to another user"):
        DiskCache(tmp_path, 1 << 20)
