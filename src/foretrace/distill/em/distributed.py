"""The processes that train together: one process, or those that torchrun started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from foretrace._hardware import share_cores

Result = TypeVar("Result")


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process, and the number of processes that train together.

    Attributes:
        rank: The index of this process.
        size: The number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def local_rows(self, rows: Tensor) -> Tensor:
        """Return this process's share of rows that all processes hold."""
        return rows[self.rank :: self.size]

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Take the elementwise maximum of a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def run_on_leader(self, function: Callable[[], Result]) -> Result:
        """Call a function in the leader; return its result, or raise its error, in every process.

        The other processes wait for it.
        """
        if self.size == 1:
            return function()
        outcome: list[Result | Exception | None] = [None]
        if self.is_leader:
            try:
                outcome[0] = function()
            except Exception as error:  # raised below, by every process
                outcome[0] = error
        dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return cast(Result, outcome[0])

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the leader's tensor to all processes, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)


def launched_group() -> ProcessGroup:
    """Return this process's rank among the processes of torchrun, whether connected or not."""
    return ProcessGroup(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


@contextmanager
def process_group(device: torch.device | str = "cpu") -> Iterator[ProcessGroup]:
    """Connect the processes that torchrun started, by NCCL on GPUs and by gloo on CPUs.

    Connect and close nothing without torchrun, or if the processes are connected already. Inside
    the context, the processes on one machine divide its cores among them.

    Args:
        device: The device that this process trains on.

    Yields:
        The group, with this process's rank.

    Example:
        >>> from foretrace.distill.em.distributed import process_group
        >>> with process_group("cpu") as group:
        ...     group.rank, group.size
        (0, 1)
    """
    with share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        if launched_group().size == 1 or dist.is_initialized():
            yield current_group()
            return
        # The leader may write a large table while the others wait for it: hence the long timeout.
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=6))
        try:
            yield current_group()
            # In torch 2.4, a process may wait for ever if another one has left before it does.
            dist.barrier()
        finally:
            dist.destroy_process_group()


def current_group() -> ProcessGroup:
    """Return the connected group: one process, unless inside `process_group`."""
    if dist.is_available() and dist.is_initialized():
        return ProcessGroup(dist.get_rank(), dist.get_world_size())
    return ProcessGroup()
