"""Files in an object store, over HTTP, with errors of the server and requests that time out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foretrace as ft
import s3_server
from foretrace import _io, _remote
from foretrace.distill import Corpus, EMConfig, LatentConfig
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.hmm.storage import named_tensors

pytest.importorskip("moto", reason="needs moto")
pytest.importorskip("s3fs", reason="needs the extra `s3`")
pytest.importorskip("upath", reason="needs the extra `s3`")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TIMEOUT = 0.5


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """Return an S3 store that fails in every 11th request, and is late in every 55th."""
    import fsspec.config

    with s3_server.serve(every=11, delay=2 * TIMEOUT) as (address, failures):
        fsspec.config.conf["s3"] = {
            "endpoint_url": address,
            "key": "key",
            "secret": "secret",
            "config_kwargs": {"read_timeout": TIMEOUT, "retries": {"max_attempts": 5}},
        }
        _remote.to_path("s3://bucket").fs.mkdir("bucket")  # type: ignore[attr-defined]
        yield failures
        fsspec.config.conf.pop("s3")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "foretrace" / "objects"


def test_files_are_complete_or_absent(store: Any) -> None:
    path = _remote.to_path("s3://bucket/files") / "numbers.safetensors"
    with pytest.raises(InvalidFileError, match=r"has no numbers\.safetensors"):
        _io.read_tensors(path)
    with pytest.raises(TypeError), _io.atomic_write(path) as scratch:
        scratch.write_text(None)  # type: ignore[arg-type]
    assert not path.exists()
    _io.write_tensors(path, {"numbers": torch.arange(5)}, {"note": "n"})
    assert _io.read_header(path, "numbers") == ((5,), {"note": "n"})
    tensors, metadata = _io.read_tensors(path)
    assert (tensors["numbers"].tolist(), metadata) == ([0, 1, 2, 3, 4], {"note": "n"})
    with pytest.raises(FileExistsError):
        _io.write_tensors(path, {}, {}, replace=False)
    path.write_bytes(path.read_bytes()[:-1])
    assert _io.missing_files([path, path.with_name("other")]) == [0, 1]
    assert not path.exists()  # it was cut short


def test_the_cache_is_bounded(store: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remote, "CACHE_BYTES", 3000)
    paths = [_remote.to_path(f"s3://bucket/cache/{n}") for n in range(5)]
    mapped = []
    for number, path in enumerate(paths):
        _io.write_tensors(path, {"a": torch.full((250,), float(number))}, {})
        mapped.append(_io.read_tensors(path)[0]["a"])
        assert sum(file.stat().st_size for file in cache.iterdir()) <= 3000
    assert [int(tensor[-1]) for tensor in mapped] == list(range(5))  # also of removed files


def test_stores_that_show_half_files_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'sftp' is not an object store.*mount it"):
        _remote.to_path("sftp://host/folder")


@pytest.mark.slow
def test_a_distillation_in_an_object_store(store: Any, tiny_lm: Path, tmp_path: Path) -> None:
    """Bit by bit the corpus of a local folder; it resumes, and removes what it no longer needs."""
    pytest.importorskip("faiss", reason="needs the extra `transformers`")
    config = ft.DistillConfig(
        num_states=8,
        sequences=300,
        length=16,
        shard_rows=40,
        latent=LatentConfig(iterations=2),
        em=EMConfig(epochs=2, batch_size=50, held_out=50, evaluations=2, checkpoint_minutes=0),
    )
    expected = ft.distill(str(tiny_lm), config, out=tmp_path / "local")
    url = "s3://bucket/my-hmm"

    def interrupt(progress: Any) -> None:
        if progress.stage == "EM" and progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.distill(str(tiny_lm), config, out=url, on_progress=interrupt)
    hmm = ft.distill(str(tiny_lm), config, out=url)
    ours, theirs = Corpus(f"{url}/work/corpus"), Corpus(tmp_path / "local" / "work" / "corpus")
    for left, right in zip(ours.shards(), theirs.shards(), strict=True):
        assert torch.equal(ours.read(left), theirs.read(right))
    tables = named_tensors(ft.HMM.from_pretrained(url))
    for name, table in named_tensors(expected).items():
        assert torch.allclose(tables[name], table, atol=1e-6), name
        assert torch.equal(named_tensors(hmm)[name], tables[name])
    assert not list(_remote.to_path(url).glob("work/hidden/**/*.safetensors"))
    assert store.failed > 10
    assert store.late > 0
