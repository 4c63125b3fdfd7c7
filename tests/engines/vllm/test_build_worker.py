"""The process that builds tables: a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the environment with vLLM in it")

from foretrace.engines.vllm.build_worker import BuildWorker
from foretrace.engines.vllm.settings import Settings
from random_attributes import write_random
from tiny_lm import WORDS, tiny_hmm, word_tokenizer

pytestmark = pytest.mark.vllm


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment of a server with one attribute; return the folder of its tables."""
    hmm = tiny_hmm(word_tokenizer(), states=8)
    hmm.save_pretrained(tmp_path / "hmm")
    known = hmm.config.tokenizer_fingerprint
    write_random(tmp_path / "attributes", "a0", len(WORDS), share=0.5, known=known, seed=0)
    tables = tmp_path / "tables"
    settings = Settings(str(tmp_path / "hmm"), str(tmp_path / "attributes"), str(tables))
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    return tables


@pytest.fixture
def worker() -> Iterator[BuildWorker]:
    worker = BuildWorker()
    yield worker
    worker.stop()


def test_it_builds_refuses_and_starts_again(tables: Path, worker: BuildWorker) -> None:
    result = worker.build({"goal": "~a0"})
    assert result.error is None
    assert result.seconds > 0
    assert len(list(tables.rglob("*.table"))) == 1
    refused = worker.build({"goal": "absent"})
    assert refused.error is not None
    assert "no attribute called absent" in refused.error
    worker.stop()
    assert worker.build({"goal": "a0"}).error is None


def test_a_worker_that_cannot_start_is_an_error(
    tables: Path, worker: BuildWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRACE_SERVE_HMM", str(tables / "absent"))
    with pytest.raises(OSError, match="builds tables failed"):
        worker.build({"goal": "a0"})
