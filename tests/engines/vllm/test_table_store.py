"""Tables and markers on disk: budget, leases, and entries that appear and disappear as a whole."""

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import torch

from foretrace import _io
from foretrace.attribute import Attribute
from foretrace.engines.vllm.table_store import (
    LOW_WATER,
    ByteLRU,
    TableLoader,
    TableStore,
    process_folder,
)
from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Marker
from foretrace.steering.markers import CompiledMarker

HORIZON, TOKENS = 3, 10
TINY = HMM.random(4, TOKENS, eos_token_id=0, seed=0)
LETTERS = [b"", *(bytes([97 + index]) for index in range(TOKENS - 1))]


def lookahead() -> Lookahead:
    return Lookahead(TINY, Attribute.from_weights(torch.full((TOKENS,), 0.5)), HORIZON)


def table_size() -> int:
    """Return the bytes of a table in memory, which the store makes room for."""
    return sum(tensor.nbytes for tensor in lookahead().tables)


def entry_size(folder: Path) -> int:
    """Return the bytes of an entry on the disk."""
    store = TableStore(folder / "size", 1 << 20)
    store.add_lookahead("key", lookahead())
    return sum(path.stat().st_size for path in (store.folder / "key").iterdir())


def filled(folder: Path, budget: int, count: int) -> TableStore:
    """Return a store with tables `0`, `1`, ..., of which the first was used first."""
    store = TableStore(folder / "filled", 1 << 20)
    for key in range(count):
        store.add_lookahead(str(key), lookahead())
        os.utime(store.folder / str(key), (key, key))
    return TableStore(folder / "filled", budget)


def keys(store: TableStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_table_is_read_as_it_was_built(tmp_path: Path) -> None:
    store, built = TableStore(str(tmp_path), 1 << 20), lookahead()
    assert not store.has("key")
    store.add_lookahead("key", built)
    assert store.has("key")
    read = store.lookahead("key", TINY, HORIZON)
    assert torch.equal(read.tables.values, built.tables.values)
    assert torch.equal(read.tables.log_scales, built.tables.log_scales)
    assert torch.equal(read.tables.log_missing, built.tables.log_missing)
    size = store.size("key")
    assert (size.terms, size.nbytes, size.min_tokens) == (1, table_size(), None)
    assert not size.requires_text
    assert not size.has_evidence


def test_the_size_of_a_goal_says_what_its_text_needs(tmp_path: Path) -> None:
    store = TableStore(tmp_path, 1 << 20)
    store.add_lookahead("key", Lookahead(TINY, Attribute.contains("abc", LETTERS), HORIZON))
    assert store.size("key").min_tokens == 3
    assert store.size("key").requires_text


def test_a_marker_is_read_as_it_was_compiled(tmp_path: Path) -> None:
    store = TableStore(tmp_path, 1 << 20)
    marker = Marker("ab", LETTERS)
    compiled = CompiledMarker.of(marker)
    store.add_marker("key", compiled)
    read = store.marker("key", marker)
    assert (read.marker, read.found) == (marker, compiled.found)
    assert torch.equal(read.dfa.transitions, compiled.dfa.transitions)
    assert torch.equal(read.dfa.tokens, compiled.dfa.tokens)
    assert read.nbytes == compiled.nbytes


@pytest.mark.parametrize(("name", "value"), [("values", 1.5), ("values", -0.5), ("log_scales", 1)])
def test_a_damaged_table_is_refused_and_removed(tmp_path: Path, name: str, value: float) -> None:
    store = TableStore(tmp_path, 1 << 20)
    store.add_lookahead("key", lookahead())
    path = store.folder / "key" / "table"
    tensors = {key: tensor.clone() for key, tensor in _io.read_tensors(path)[0].items()}
    wrong = torch.full_like(tensors[name], value)
    tensors[name] = wrong / 0 if name == "log_scales" else wrong
    _io.write_tensors(path, tensors, {})
    with pytest.raises(InvalidFileError, match="key is damaged"):
        store.lookahead("key", TINY, HORIZON)
    with pytest.raises(InvalidFileError, match="key is damaged"):
        TableLoader(store, TINY, HORIZON).prefetch(["key"], {}).result()
    assert not store.has("key")  # the next request has it built again


def test_a_file_that_is_cut_short_is_removed(tmp_path: Path) -> None:
    store = TableStore(tmp_path, 1 << 20)
    store.add_lookahead("key", lookahead())
    os.truncate(store.folder / "key" / "table", 100)
    with pytest.raises(ForetraceError):
        TableLoader(store, TINY, HORIZON).prefetch(["key"], {}).result()
    assert not store.has("key")


def test_a_table_of_another_horizon_is_refused(tmp_path: Path) -> None:
    store = TableStore(tmp_path, 1 << 20)
    store.add_lookahead("key", lookahead())
    with pytest.raises(InvalidFileError, match="key/table"):
        store.lookahead("key", TINY, HORIZON + 1)


def test_a_lease_is_none_without_a_table(tmp_path: Path) -> None:
    assert TableStore(tmp_path, 1 << 20).lease("absent") is None


def test_leases_leave_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the time of the last use cannot be written, and where an entry is evicted."""
    store = TableStore(tmp_path, 1 << 20)
    store.add_lookahead("key", lookahead())
    before = open_descriptors()
    for _ in range(5):
        lease = store.lease("key")
        assert lease is not None
        lease.release()
        lease.release()
        store.lease("absent")
    monkeypatch.setattr(os, "utime", _read_only)
    lease = store.lease("key")
    assert lease is not None
    lease.release()
    with locked(store.folder / "key"):
        assert store.lease("key") is None  # another process evicts it
    assert open_descriptors() == before


def _read_only(*args: object) -> None:
    raise OSError("Read-only file system")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def test_tables_up_to_the_budget_are_kept(tmp_path: Path) -> None:
    exact = 2 * entry_size(tmp_path) + table_size()
    store = filled(tmp_path, exact, 2)
    store.add_lookahead("new", lookahead())
    assert keys(store) == ["0", "1", "new"]


def test_the_tables_used_first_are_evicted(tmp_path: Path) -> None:
    """Down to the low-water mark: of five, three may stay beside the new one, and no fourth."""
    size, new = entry_size(tmp_path), table_size()
    budget = int((3 * size + new) / LOW_WATER) + 1
    store = filled(tmp_path, budget, 5)
    lease = store.lease("0")  # marks it as used now
    assert lease is not None
    lease.release()
    store.add_lookahead("new", lookahead())
    assert keys(store) == ["0", "3", "4", "new"]


def test_a_leased_table_is_not_evicted(tmp_path: Path) -> None:
    exact = entry_size(tmp_path) + table_size()
    store = filled(tmp_path, exact, 3)
    lease = store.lease("0")
    assert lease is not None
    store.add_lookahead("new", lookahead())  # the leased one and the new one fit exactly
    assert keys(store) == ["0", "new"]
    smaller = TableStore(tmp_path / "filled", exact - 1)
    with pytest.raises(OSError, match=r"A table of 0 MB does not fit .* of 0 MB"):
        smaller.add_lookahead("more", lookahead())
    lease.release()
    smaller.add_lookahead("more", lookahead())
    assert keys(store) == ["more"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    store = TableStore(tmp_path, 1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))  # as if the disk were full
    try:
        with pytest.raises(OSError, match="large"):
            store.add_lookahead("key", lookahead())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert keys(store) == []
    store.add_lookahead("key", lookahead())
    assert keys(store) == ["key"]


def test_what_a_crash_leaves_behind_is_evicted(tmp_path: Path) -> None:
    store = filled(tmp_path, 2 * entry_size(tmp_path) + table_size(), 2)
    left = store.folder / ".incomplete-0"
    left.mkdir()
    (left / "attribute").write_bytes(b"0" * 1000)
    os.utime(left, (0, 0))
    store.add_lookahead("new", lookahead())
    assert not left.exists()


def test_entries_are_whole_while_processes_build_and_evict(tmp_path: Path) -> None:
    """Eviction and building of the same key, over and over: whatever exists can be read."""
    # Two entries are being written and one is on lease: these cannot be evicted.
    budget = 6 * entry_size(tmp_path) + table_size()
    stores = [TableStore(tmp_path / "shared", budget) for _ in range(3)]

    def churn(store: TableStore, own: str) -> None:
        for index in range(30):
            store.add_lookahead("shared" if index % 2 else f"{own}{index}", lookahead())

    threads = [Thread(target=churn, args=(store, str(i))) for i, store in enumerate(stores[:2])]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (lease := stores[2].lease("shared")) is not None:
            assert stores[2].lookahead("shared", TINY, HORIZON).horizon == HORIZON
            lease.release()
    for thread in threads:
        thread.join()
    for key in keys(stores[0]):
        stores[0].lookahead(key, TINY, HORIZON)


def test_the_directory_is_private(tmp_path: Path) -> None:
    folder = TableStore(tmp_path / "deep" / "path", 1 << 20).folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert TableStore(tmp_path / "deep" / "path", 1 << 20).folder == folder


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    TableStore(tmp_path, 1 << 20).folder.chmod(mode)
    with pytest.raises(InvalidInputError, match="others can write to it"):
        TableStore(tmp_path, 1 << 20)


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    folder = TableStore(tmp_path, 1 << 20).folder
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match="belongs to another user"):
        TableStore(tmp_path, 1 << 20)


def test_folders_of_ended_processes_are_deleted(tmp_path: Path) -> None:
    """A process that executes another program keeps its folder."""
    code = (
        "import os, sys; from pathlib import Path; "
        "from foretrace.engines.vllm.table_store import process_folder; "
        "print(process_folder(Path(sys.argv[1]), 'metrics'), flush=True); "
        "os.execvp('cat', ['cat'])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        folder = Path(server.stdout.readline().strip())
        (folder / "counters.db").write_text("")
        process_folder(tmp_path, "metrics")
        assert (folder / "counters.db").exists()
        server.communicate()
    process_folder(tmp_path, "metrics")
    assert not folder.exists()


def test_the_least_recently_used_value_is_dropped_first() -> None:
    kept: ByteLRU[str] = ByteLRU(10)
    for key in ("a", "b"):
        kept.add(key, key, 5)
    assert kept.get("a") == "a"
    kept.add("c", "c", 5)
    assert [kept.get(key) for key in "abc"] == ["a", None, "c"]
    kept.add("large", "large", 99)
    assert [kept.get(key) for key in ("a", "c", "large")] == [None, None, "large"]


def test_tables_and_markers_are_loaded_in_a_thread(tmp_path: Path) -> None:
    store, marker = TableStore(tmp_path, 1 << 20), Marker("ab", LETTERS)
    store.add_lookahead("key", lookahead())
    store.add_marker("marker", CompiledMarker.of(marker))
    loaded = TableLoader(store, TINY, HORIZON).prefetch(["key"], {"marker": marker}).result()
    assert isinstance(loaded["key"], Lookahead)
    assert isinstance(loaded["marker"], CompiledMarker)
