"""The processes that train together: one, or as many as torchrun started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

Found = TypeVar("Found")


@dataclass(frozen=True)
class Group:
    """One process among those that train together."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """Take this process's part of rows that all of them hold."""
        return rows[self.rank :: self.size]

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def any(self, marks: Tensor) -> None:
        """Mark, in place, what any process has marked (uint8)."""
        if self.size > 1:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX)

    def agree(self, find: Callable[[], Found]) -> Found:
        """Let the leading process find something out for all; if it fails, all raise its error."""
        if self.size == 1:
            return find()
        told: list[Found | Exception | None] = [None]
        if self.leads:
            try:
                told[0] = find()
            except Exception as error:  # raised below, by every process
                told[0] = error
        dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        return cast(Found, told[0])

    def follow(self, tensor: Tensor) -> None:
        """Take over the leading process's tensor, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)


def launched() -> Group:
    """Tell which of torchrun's processes this is, joined or not: one of one without torchrun."""
    return Group(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


@contextmanager
def joined(device: torch.device | str = "cpu") -> Iterator[Group]:
    """Join the processes that torchrun started, by NCCL on GPUs and gloo elsewhere."""
    if launched().size == 1 or dist.is_initialized():
        yield current()
        return
    # One process may write a large table while the others wait for it.
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=6))
    try:
        yield current()
    finally:
        dist.destroy_process_group()


def current() -> Group:
    """Give the group as it stands: one process, unless `joined`."""
    if dist.is_available() and dist.is_initialized():
        return Group(dist.get_rank(), dist.get_world_size())
    return Group()
