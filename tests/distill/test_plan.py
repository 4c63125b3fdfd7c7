"""The plan: every stage timed, and nothing left behind."""

from pathlib import Path

import pytest

from foretrace.distill import DistillConfig
from foretrace.distill.costs import costs, gigabytes, require_disk
from foretrace.distill.plan import plan
from foretrace.errors import InvalidInputError

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("faiss", reason="needs the extra `transformers`")


def test_a_plan_names_all_stages_and_leaves_nothing(tiny_lm: Path, tmp_path: Path) -> None:
    config = DistillConfig(num_states=16, sequences=100_000, length=16)
    found = plan(str(tiny_lm), config, prompts=["w1 w2"], folder=tmp_path / "later")
    assert [stage.name for stage in found.stages] == [
        "load the LM",
        "sample",
        "read hidden states",
        "cluster them",
        "train by EM",
        "write",
    ]
    assert all(stage.seconds > 0 for stage in found.stages)
    assert found.seconds > 1
    assert not list(tmp_path.iterdir())


def test_a_random_start_needs_no_reading(tiny_lm: Path, tmp_path: Path) -> None:
    config = DistillConfig(num_states=16, sequences=10_000, length=16, start="random")
    stages = [stage.name for stage in plan(str(tiny_lm), config, folder=tmp_path).stages]
    assert stages == ["load the LM", "sample", "train by EM", "write"]


def test_bytes_at_scale() -> None:
    """10M sequences of an LM like Llama-3 into 4,096 states: known by arithmetic."""
    found = costs(
        states=4096,
        vocab_size=128_256,
        sequences=10_000_000,
        length=32,
        read_rows=32_768,
        dimensions=128,
    )
    assert found.corpus == 10_000_000 * 32 * 4
    assert found.table == pytest.approx(2.17e9, rel=0.01)
    assert found.hidden == pytest.approx(0.285e9, rel=0.01)
    assert found.disk == found.corpus + 3 * found.table
    assert gigabytes(found.table) == "2.2 GB"


def test_disk_is_looked_at_where_the_folder_will_be(tmp_path: Path) -> None:
    require_disk(tmp_path / "not" / "yet", 1)
    with pytest.raises(InvalidInputError, match="but has"):
        require_disk(tmp_path / "not" / "yet", 10**18)
