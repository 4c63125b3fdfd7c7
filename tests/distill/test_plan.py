"""The plan times every stage, and leaves no file behind."""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from foretrace.distill import DistillConfig
from foretrace.distill.config import format_bytes, require_disk
from foretrace.distill.plan import plan
from foretrace.errors import InvalidInputError

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("faiss", reason="needs the extra `transformers`")


def test_a_plan_has_all_stages_and_leaves_no_file(tiny_lm: Path, tmp_path: Path) -> None:
    config = DistillConfig(num_states=16, sequences=100_000, length=16)
    estimate = plan(str(tiny_lm), config, prompts=["w1 w2"], folder=tmp_path / "later")
    assert [stage.name for stage in estimate.stages] == [
        "load the LM",
        "sample",
        "read hidden states",
        "cluster them",
        "train by EM",
        "write",
    ]
    assert all(stage.seconds > 0 for stage in estimate.stages)
    assert estimate.seconds > 1
    assert not list(tmp_path.iterdir())


def test_workers_divide_sampling_and_training(
    tiny_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_clock() -> Callable[[], float]:
        """Return a clock on which whatever comes later takes longer, the same in both plans."""
        return partial(next, (float(reading**2) for reading in count()))

    def seconds(workers: int) -> dict[str, float]:
        monkeypatch.setattr("foretrace.distill.plan.perf_counter", fake_clock())
        timed = plan(str(tiny_lm), config, folder=tmp_path, workers=workers)
        return {stage.name: stage.seconds for stage in timed.stages}

    config = DistillConfig(num_states=16, sequences=1_000_000, length=16, start="random")
    one, many = seconds(1), seconds(100)
    assert many["sample"] == pytest.approx(one["sample"] / 100)
    assert many["train by EM"] < one["train by EM"]
    assert many["load the LM"] == one["load the LM"]


def test_a_random_start_has_no_stage_of_hidden_states(tiny_lm: Path, tmp_path: Path) -> None:
    config = DistillConfig(num_states=16, sequences=10_000, length=16, start="random")
    stages = [stage.name for stage in plan(str(tiny_lm), config, folder=tmp_path).stages]
    assert stages == ["load the LM", "sample", "train by EM", "write"]


def test_costs_of_a_large_run() -> None:
    """10M sequences of an LM such as Llama-3, and 4,096 states."""
    total = DistillConfig(num_states=4096, sequences=10_000_000, length=32).costs(128_256)
    assert total.corpus == 10_000_000 * 32 * 4
    assert total.table == pytest.approx(2.17e9, rel=0.01)
    assert total.hidden == pytest.approx(0.285e9, rel=0.01)
    assert total.disk == total.corpus + 3 * total.table
    assert format_bytes(total.table) == "2.2 GB"


def test_disk_space_is_checked_at_the_nearest_existing_folder(tmp_path: Path) -> None:
    require_disk(tmp_path / "not" / "yet", 1)
    with pytest.raises(InvalidInputError, match="but has"):
        require_disk(tmp_path / "not" / "yet", 10**18)
