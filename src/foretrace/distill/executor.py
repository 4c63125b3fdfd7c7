"""Where the stages of a distillation run. A stage produces numbered files, its shards.

`LocalExecutor` runs in this process, or in the processes of torchrun. `ray_executor.RayExecutor`
runs on a Ray cluster. A shard depends on its number and the settings alone, so that every executor
produces the same files.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from foretrace.distill.em.config import Progress
from foretrace.distill.em.distributed import ProcessGroup, current_group, process_group

Produce = Callable[[int], int]
"""Writes the shard of a number; returns the number of its tokens."""
Load = Callable[[], AbstractContextManager[Produce]]
"""Loads what a worker needs, such as an LM. It can be pickled, to run on another machine."""
Workers = Callable[[Sequence[int]], Iterator[int]]
"""Produces shards; yields the number of tokens of each when it is complete."""
Train = Callable[[str, Callable[[Progress], None]], None]
"""Trains in one of the processes of a group, on a device. It can be pickled."""


class Executor(Protocol):
    """Runs the stages of a distillation."""

    def connect(self, device: str) -> AbstractContextManager[ProcessGroup]:
        """Connect the processes that run the same distillation."""

    def workers(self, stage: str, load: Load) -> AbstractContextManager[Workers]:
        """Start workers for a stage, and stop them at the end of the context."""

    def train(self, train: Train, device: str, on_progress: Callable[[Progress], None]) -> None:
        """Call a function in all processes that train together."""


class LocalExecutor:
    """Runs all stages in this process. Processes of torchrun divide the shards among them."""

    def connect(self, device: str) -> AbstractContextManager[ProcessGroup]:
        """Connect the processes of torchrun."""
        return process_group(device)

    @contextmanager
    def workers(self, stage: str, load: Load) -> Iterator[Workers]:
        """Yield a function that produces shards one after another."""
        group = current_group()
        with ExitStack() as stack:
            loaded: list[Produce] = []  # when the first shard is produced

            def produce(shards: Sequence[int]) -> Iterator[int]:
                for shard in shards[group.rank :: group.size]:
                    if not loaded:
                        loaded.append(stack.enter_context(load()))
                    yield loaded[0](shard) * group.size  # all have the same share of the work
                group.run_on_leader(lambda: None)  # wait for the others

            yield produce

    def train(self, train: Train, device: str, on_progress: Callable[[Progress], None]) -> None:
        """Train in this process, together with the other processes of torchrun."""
        train(device, on_progress)
