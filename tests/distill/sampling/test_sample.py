"""Sampling: the LM's distribution, and each shard exactly once."""

from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from foretrace.distill.sampling.sample import SamplingConfig, sample
from foretrace.errors import InvalidFileError, InvalidInputError

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.distill.config import LMConfig
from foretrace.distill.sampling import transformers_source
from foretrace.distill.sampling.transformers_source import TransformersSource


@pytest.fixture(scope="module")
def source(tiny_lm: Path) -> TransformersSource:
    return TransformersSource.load(str(tiny_lm))


def test_first_tokens_follow_the_distribution_of_the_lm(source: TransformersSource) -> None:
    """No top-k, top-p or temperature applies: a chi-square test over the vocabulary."""
    with torch.no_grad():
        logits = source.model(torch.tensor([[0]])).logits[0, -1]
    expected = torch.softmax(logits.double(), -1)
    drawn = source.draw([[]] * 6000, 2, seed=0)[:, 0]
    observed = torch.bincount(drawn, minlength=source.vocab_size)
    assert chisquare(observed, expected / expected.sum() * 6000).pvalue > 1e-3
    assert (observed > 0).sum() > 50  # transformers' default keeps 50


def test_a_prefix_conditions_its_row_alone(source: TransformersSource) -> None:
    """Rows of other lengths in the batch have no effect: padding is masked."""
    prefix = [5, 9, 11]
    with torch.no_grad():
        logits = source.model(torch.tensor([[0, *prefix]])).logits[0, -1]
    expected = torch.softmax(logits.double(), -1)
    prefixes = [prefix, [7], [3, 4, 5, 6, 7]] * 3000
    drawn = source.draw(prefixes, 6, seed=1)
    assert (drawn[::3, :3] == torch.tensor(prefix)).all()
    observed = torch.bincount(drawn[::3, 3], minlength=source.vocab_size)
    assert chisquare(observed, expected / expected.sum() * 3000).pvalue > 1e-3


def test_rows_are_padded_after_the_end_of_text(source: TransformersSource) -> None:
    rows = source.draw([[]] * 2000, 20, seed=2)
    ended = (rows == 0).cumsum(1) > 0
    assert ended[:, -1].any()
    assert (rows[ended] == 0).all()


def test_a_corpus_follows_its_settings(source: TransformersSource, tmp_path: Path) -> None:
    config = SamplingConfig(sequences=250, length=8, shard_rows=100, prompted=0.4)
    observed: list[int] = []
    corpus = sample(tmp_path, source, config, ["w5 w6 w7", "w9 " * 30], observed.append)
    assert [shard.rows for shard in corpus.shards()] == [100, 100, 50]
    assert observed == [800, 800, 400]  # tokens
    rows = torch.cat([corpus.read(shard).long() for shard in corpus.shards()])
    short = (rows[:, :3] == torch.tensor(source.encode(["w5 w6 w7"])[0])).all(1)
    long = (rows[:, :4] == source.encode(["w9"])[0][0]).all(1)  # cut at half a row
    assert 0.35 < (short | long).float().mean() < 0.5
    manifest = corpus.manifest
    assert manifest.eos_token_id == 0
    assert manifest.vocab_size == 64
    assert manifest.tokenizer_fingerprint is not None
    assert manifest.sampling["top_k"] == 0


def test_existing_shards_are_not_sampled_again(source: TransformersSource, tmp_path: Path) -> None:
    config = SamplingConfig(sequences=120, length=6, shard_rows=40)
    corpus = sample(tmp_path, source, config)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    corpus.shards()[1].path.unlink()
    observed: list[int] = []
    sample(tmp_path, source, config, on_progress=observed.append)
    assert observed == [240]
    for path, modified in written.items():
        if path.name != "shard-000001.safetensors":
            assert path.stat().st_mtime_ns == modified


def test_shards_depend_on_the_seed_alone(source: TransformersSource, tmp_path: Path) -> None:
    config = SamplingConfig(sequences=80, length=6, shard_rows=40)
    once, again = (sample(tmp_path / name, source, config) for name in ("once", "again"))
    for left, right in zip(once.shards(), again.shards(), strict=True):
        assert torch.equal(once.read(left), again.read(right))


def test_other_settings_are_refused(source: TransformersSource, tmp_path: Path) -> None:
    sample(tmp_path, source, SamplingConfig(sequences=10, length=6, shard_rows=10))
    with pytest.raises(InvalidFileError, match="length differ"):
        sample(tmp_path, source, SamplingConfig(sequences=10, length=7, shard_rows=10))


def test_a_shard_that_was_cut_short_is_sampled_again(
    source: TransformersSource, tmp_path: Path
) -> None:
    config = SamplingConfig(sequences=120, length=6, shard_rows=40)
    corpus = sample(tmp_path, source, config)
    paths = [shard.path for shard in corpus.shards()]
    contents = [path.read_bytes() for path in paths]
    for path, size in zip(paths, (0, len(contents[1]) - 1, None), strict=True):
        path.write_bytes(path.read_bytes()[:size])
    assert corpus.missing(3) == [0, 1]
    sample(tmp_path, source, config)
    assert [path.read_bytes() for path in paths] == contents


def test_a_batch_halves_when_memory_runs_out(
    source: TransformersSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a GPU that runs out of memory is simulated."""
    generate, fits = source.model.generate, 16

    def limited(input_ids: torch.Tensor, **settings: object) -> object:
        if len(input_ids) > fits:
            raise torch.OutOfMemoryError("too large")
        return generate(input_ids, **settings)  # type: ignore[operator]

    monkeypatch.setattr(source.model, "generate", limited)
    monkeypatch.setattr(source, "batch_size", 100)
    assert source.draw([[]] * 50, 6, seed=0).shape == (50, 6)
    assert source.batch_size == 12
    fits = 0
    with pytest.raises(InvalidInputError, match="single sequence"):
        source.draw([[]] * 50, 6, seed=0)


@pytest.mark.parametrize("native", [torch.bfloat16, torch.float32])
def test_the_default_dtype_follows_the_hardware(
    native: torch.dtype, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []

    def default_dtype(device: str) -> torch.dtype:
        devices.append(device)
        return native

    monkeypatch.setattr(transformers_source, "default_dtype", default_dtype)
    assert TransformersSource.load(str(tiny_lm)).model.dtype is native
    assert LMConfig().load_transformers(str(tiny_lm)).model.dtype is native
    assert devices == ["cpu", "cpu"]
    explicit = TransformersSource.load(str(tiny_lm), dtype="float64")
    assert explicit.model.dtype is torch.float64


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match=r"no file or folder .*nowhere\. Check the spelling"):
        TransformersSource.load(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match=r"cannot be loaded.*check the spelling"):
        TransformersSource.load(str(tmp_path / "empty"))


def test_a_missing_end_of_text_token(tiny_lm: Path) -> None:
    with pytest.raises(InvalidInputError, match="no token 'w99'"):
        TransformersSource.load(str(tiny_lm), end_of_text_token="w99")


@pytest.mark.parametrize(
    "wrong", [{"sequences": 0}, {"length": 1}, {"shard_rows": 0}, {"prompted": 1.5}]
)
def test_invalid_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        SamplingConfig(**wrong)  # type: ignore[arg-type]
