"""The benchmark of a step on a GPU runs where there is none, and counts what it should."""

import json
import sys
from pathlib import Path

import pytest

from page_runner import PROJECT

BENCHMARK = PROJECT / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    import gpu

    return gpu


def test_it_runs_on_a_cpu(
    gpu: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick", "--json", str(file)])
    gpu.main()  # type: ignore[attr-defined]
    rows = {row["name"]: row["value"] for row in json.loads(file.read_text())}
    size = "64 states, 1,000 tokens, 64 rows"
    assert rows[f"{size}: operations"] == 150
    assert rows[f"{size}: measured"] > 0


def test_bytes_grow_with_rows_and_tokens(gpu: object) -> None:
    """The logits dominate a large batch, and the transition of many states a small one."""
    count = gpu.count  # type: ignore[attr-defined]
    ratio = count(1024, 100_000, 256).nbytes / count(1024, 100_000, 128).nbytes
    assert 1.9 < ratio < 2.1
    many_states = count(32_768, 50_000, 1).nbytes
    assert 32_768**2 * 4 < many_states < 1.1 * 32_768**2 * 4
