"""A real Ray cluster of two nodes: the same result as one process, whatever is killed meanwhile."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import foretrace as ft
import forked
import squares
from foretrace import _io
from foretrace.distill import EMConfig, LatentConfig
from foretrace.distill.executor import Produce
from foretrace.distill.run import StageProgress
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.hmm.storage import named_tensors

pytest.importorskip("ray", reason="needs the extra `ray`")
pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("faiss", reason="needs the extra `transformers`")

import psutil  # Ray needs it
import ray

from foretrace.distill.ray_executor import RayExecutor, connect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CONFIG = ft.DistillConfig(
    num_states=8,
    sequences=600,
    length=16,
    shard_rows=40,
    latent=LatentConfig(iterations=3),
    em=EMConfig(epochs=4, batch_size=50, held_out=100, evaluations=4, checkpoint_minutes=0),
)
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 2}
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {**NODE, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE)
    ray.init(cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240  # a busy machine takes minutes
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def processes(cluster: Any, name: str) -> list[int]:
    """Return the processes of the cluster's actors of a class, by the title that Ray gives them."""
    raylets = [info for node in cluster.list_all_nodes() for info in node.all_processes["raylet"]]
    children = [
        child
        for raylet in raylets
        if psutil.pid_exists(raylet.process.pid)
        for child in psutil.Process(raylet.process.pid).children(recursive=True)
    ]
    return [child.pid for child in children if child.name().startswith(f"ray::{name}")]


SCRIPT = """
import json, sys
import foretrace as ft
from foretrace.distill import EMConfig, LatentConfig
from foretrace.distill.ray_executor import RayExecutor
settings = json.loads(sys.argv[1])
settings["latent"] = LatentConfig(**settings["latent"])
settings["em"] = EMConfig(**settings["em"])
executor = RayExecutor(sys.argv[4], workers=2)
ft.distill(sys.argv[2], ft.DistillConfig(**settings), out=sys.argv[3], executor=executor)
"""


def test_the_result_of_one_process_although_driver_and_workers_are_killed(
    cluster: Any, tiny_lm: Path, tmp_path: Path
) -> None:
    """kill -9 of the driver and of a worker while sampling, and of a worker of EM."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    expected = ft.distill(str(tiny_lm), CONFIG, out=alone)
    corpus = shared / "work" / "corpus"
    arguments = (json.dumps(asdict(CONFIG)), tiny_lm, shared, cluster.address)
    driver = forked.start(forked.script, SCRIPT, *arguments, stderr=Path(os.devnull))
    wait_for(lambda: len(list(corpus.glob("shard-*"))) >= 3)
    driver.kill()
    driver.join()
    assert len(list(corpus.glob("shard-*"))) < 15
    killed: list[str] = []

    def kill_once(progress: StageProgress) -> None:
        name = {"sampling": "_Worker", "EM": "RayTrainWorker"}.get(progress.stage)
        if name is not None and name not in killed:
            killed.append(name)
            os.kill(processes(cluster, name)[0], signal.SIGKILL)

    executor = RayExecutor(workers=2)
    hmm = ft.distill(str(tiny_lm), CONFIG, out=shared, executor=executor, on_progress=kill_once)
    assert killed == ["_Worker", "RayTrainWorker"]
    ours, theirs = (
        {path.name: path.read_bytes() for path in (out / "work" / "corpus").iterdir()}
        for out in (shared, alone)
    )
    assert ours == theirs  # bit by bit, and no other file
    tables = named_tensors(hmm)
    for name, table in named_tensors(expected).items():
        assert torch.allclose(tables[name], table, atol=1e-5), name


def test_a_node_that_dies_loses_no_shard(cluster: Any, tmp_path: Path) -> None:
    node = cluster.list_all_nodes()[-1]
    produced = 0
    with RayExecutor(workers=3).workers("squares", squares.stage(tmp_path)) as produce:
        for tokens in produce(range(60)):
            produced += tokens
            if produced == 10:
                os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    assert produced == 60
    assert squares.read(tmp_path) == {f"{n}.safetensors": n**2 for n in range(60)}
    assert connect("ray").nodes == 1


def test_an_error_of_a_worker_is_raised_by_the_driver(cluster: Any, tmp_path: Path) -> None:
    @contextmanager
    def load() -> Iterator[Produce]:
        yield lambda number: len(_io.read_json(tmp_path / "nothing.json"))

    with (
        RayExecutor(workers=1).workers("nothing", load) as produce,
        pytest.raises(InvalidFileError, match=r"has no nothing\.json"),
    ):
        list(produce([0]))


def test_workers_that_do_not_fit(cluster: Any) -> None:
    with pytest.raises(InvalidInputError, match="GPUs do not fit on a cluster with 0"):
        RayExecutor(gpus_per_worker=4)
