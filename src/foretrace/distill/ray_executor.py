"""Run the stages of a distillation on a Ray cluster: workers with an LM each, and EM by Ray Train.

The driver holds one task per worker, whatever the number of shards. A worker that dies is replaced,
and another worker produces its shard.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from foretrace.distill.em.config import Progress
from foretrace.distill.em.distributed import ProcessGroup, process_group
from foretrace.distill.executor import Load, Train, Workers
from foretrace.errors import ForetraceError, InvalidInputError

if TYPE_CHECKING:
    from ray.util.queue import Queue

LOSSES = 3  # workers that may die per worker without a shard produced meanwhile
FAILURES = 5  # restarts of EM


class ClusterSize(NamedTuple):
    """The nodes and resources of a Ray cluster."""

    nodes: int
    cpus: int
    gpus: int


def connect(address: str) -> ClusterSize:
    """Connect to a cluster: `ray`, the cluster of this machine, or an address as of `ray.init`."""
    try:
        import ray
    except ImportError:
        raise InvalidInputError(
            "Ray is not installed in this environment: pip install 'foretrace[ray]', or leave "
            "out --on."
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(
                None if address == "ray" else address,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except (ConnectionError, ValueError) as error:
            raise InvalidInputError(
                f"There is no Ray cluster at {address} ({error}). Check `ray status`, or use "
                f"--on ray for a cluster on this machine."
            ) from error
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
    return ClusterSize(len(nodes), cpus, gpus)


class RayExecutor:
    """Runs the stages on a Ray cluster.

    The nodes need foretrace, the LM, and the output folder: a common file system or a URL.

    Args:
        address: `"ray"` for the cluster of this machine or of `RAY_ADDRESS`, or an address.
        workers: Workers with an LM each. By default as the cluster has room for, with a CPU of
            every node left to Ray.
        gpus_per_worker: GPUs of a worker; by default 1 if the cluster has GPUs.

    Raises:
        InvalidInputError: If Ray is not installed, there is no cluster, or it has too few GPUs.
    """

    def __init__(
        self, address: str = "ray", workers: int | None = None, gpus_per_worker: int | None = None
    ) -> None:
        size = connect(address)
        self.gpus = min(1, size.gpus) if gpus_per_worker is None else gpus_per_worker
        room = size.gpus // self.gpus if self.gpus else max(1, size.cpus - size.nodes)
        self.count = room if workers is None else workers
        if self.count < 1:
            raise InvalidInputError(
                f"Workers with {self.gpus} GPUs do not fit on a cluster with {size.gpus}. Use a "
                f"smaller --gpus-per-worker, or pass --workers if the cluster grows by itself."
            )

    def connect(self, device: str) -> AbstractContextManager[ProcessGroup]:
        """Connect nothing: one process drives the cluster."""
        return process_group("cpu")

    @contextmanager
    def workers(self, stage: str, load: Load) -> Iterator[Workers]:
        """Start workers that hold what `load` returns; yield a function that produces shards."""
        import ray

        loader = ray.put(load)  # prompts may be large: one copy per node
        decorate: Any = ray.remote(num_cpus=1, num_gpus=self.gpus, scheduling_strategy="SPREAD")
        actor = decorate(_Worker)
        pool = _Pool(lambda: actor.remote(stage, loader), self.count)
        try:
            yield pool.produce
        finally:
            pool.stop()

    def train(self, train: Train, device: str, on_progress: Callable[[Progress], None]) -> None:
        """Train by Ray Train. After a failure it continues from the last checkpoint.

        It then takes the workers that it finds, from one to all.
        """
        import ray.train.torch
        from ray.util.queue import Queue

        api: Any = ray.train  # its annotations are of an older version

        queue = Queue(actor_options={"num_cpus": 0})
        trainer = api.torch.TorchTrainer(
            _train,
            train_loop_config={"train": train, "queue": queue},
            scaling_config=api.ScalingConfig(num_workers=(1, self.count), use_gpu=self.gpus > 0),
            run_config=api.RunConfig(
                storage_path=str(Path(gettempdir()) / "foretrace-ray-train"),
                failure_config=api.FailureConfig(max_failures=FAILURES),
            ),
        )
        watcher = Thread(target=_watch, args=(queue, on_progress), daemon=True)
        watcher.start()
        try:
            trainer.fit()
        except api.TrainingFailedError as error:
            causes = getattr(error, "worker_failures", {}).values()
            raise next((c for c in causes if isinstance(c, ForetraceError)), error) from None
        finally:
            queue.put(None)
            watcher.join()
            queue.shutdown()


class _Worker:
    """An actor that produces shards. It loads the LM when it is ready to report an error."""

    def __init__(self, stage: str, load: Load) -> None:
        from ray.util.metrics import Counter

        self.load, self.stack = load, ExitStack()
        self.tags = {"stage": stage}
        self.tokens = Counter("foretrace_tokens", "Tokens of complete shards.", ("stage",))
        self.shards = Counter("foretrace_shards", "Complete shards.", ("stage",))

    def ready(self) -> None:
        self.produce_shard = self.stack.enter_context(self.load())

    def produce(self, shard: int) -> int:
        tokens = self.produce_shard(shard)
        self.shards.inc(1, self.tags)
        if tokens:
            self.tokens.inc(tokens, self.tags)
        return tokens


class _Task(NamedTuple):
    """What a worker does: a shard, or None while it loads."""

    worker: Any
    shard: int | None


class _Pool:
    """Workers with at most one task each."""

    def __init__(self, start_worker: Callable[[], Any], count: int) -> None:
        self.start_worker, self.count = start_worker, count
        self.tasks: dict[Any, _Task] = {}
        self.idle: list[Any] = []
        for _ in range(count):
            self._add()

    def _add(self) -> None:
        worker = self.start_worker()
        self.tasks[worker.ready.remote()] = _Task(worker, None)

    def produce(self, shards: Sequence[int]) -> Iterator[int]:
        """Produce shards; yield the number of tokens of each when it is complete."""
        remaining, unfinished, losses = iter(shards), len(shards), 0
        lost: list[int] = []
        while unfinished:
            while self.idle:
                shard = lost.pop() if lost else next(remaining, None)
                if shard is None:
                    break
                worker = self.idle.pop()
                self.tasks[worker.produce.remote(shard)] = _Task(worker, shard)
            task, tokens = self._wait()
            if tokens is None:
                losses += 1
                _require_few(losses, LOSSES * self.count)
                lost += [] if task.shard is None else [task.shard]
                self._add()
                continue
            self.idle.append(task.worker)
            if task.shard is not None:
                unfinished, losses = unfinished - 1, 0
                yield tokens

    def _wait(self) -> tuple[_Task, int | None]:
        """Wait for a task; return it and its tokens, or None if its worker died."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        [done], _ = ray.wait(list(self.tasks), num_returns=1)
        task = self.tasks.pop(done)
        try:
            return task, ray.get(done) or 0
        except RayTaskError as error:
            raise error.cause from error
        except RayError:  # it died, its node did, it ran out of memory, or it cannot be reached
            ray.kill(task.worker)
            return task, None

    def stop(self) -> None:
        """End all workers, also those that wait for room in the cluster."""
        import ray

        for worker in (*self.idle, *(task.worker for task in self.tasks.values())):
            ray.kill(worker)


def _require_few(losses: int, most: int) -> None:
    if losses > most:
        raise InvalidInputError(
            f"{losses} workers died and no shard was produced meanwhile. `ray logs` says why; "
            f"often they lack memory. The same command resumes."
        )


def _train(config: dict[str, Any]) -> None:
    """Train in a worker of Ray Train; the leader sends its progress to the driver."""
    from ray.train import get_context
    from ray.train.torch import get_device

    queue: Queue = config["queue"]
    leads = get_context().get_world_rank() == 0
    config["train"](str(get_device()), queue.put if leads else lambda progress: None)


def _watch(queue: "Queue", on_progress: Callable[[Progress], None]) -> None:
    """Pass on the progress of EM, until None ends it."""
    while (progress := queue.get()) is not None:
        on_progress(progress)
