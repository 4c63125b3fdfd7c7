"""The processes of torchrun: their results, their errors, and their threads."""

import subprocess
import sys
from pathlib import Path

import pytest

from foretrace.distill.em.distributed import ProcessGroup, current_group, process_group

PROCESS = """
import torch
from foretrace import _hardware
from foretrace.distill.em.distributed import process_group
_hardware.available_cores = lambda: 4
torch.set_num_threads(4)
with process_group() as group:
    assert (group.size, group.is_leader) == (2, group.rank == 0)
    assert torch.get_num_threads() * group.size <= 4
    ranks = torch.tensor([group.rank + 1])
    group.all_reduce_sum(ranks)
    assert ranks.item() == 3
    assert group.run_on_leader(lambda: "from the leader") == "from the leader"
    try:
        group.run_on_leader(lambda: [][0])
    except IndexError:
        pass
    else:
        raise AssertionError("the error of the leader was lost")
assert torch.get_num_threads() == 4
"""


def test_processes_of_torchrun_divide_the_cores(tmp_path: Path) -> None:
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_process_is_its_own_leader() -> None:
    with process_group() as group:
        assert group == current_group() == ProcessGroup(rank=0, size=1)
        assert group.is_leader
        with pytest.raises(ZeroDivisionError):
            group.run_on_leader(lambda: 1 // 0)
