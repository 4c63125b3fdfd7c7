"""Test the linear judge: training, saving, loading, and malformed files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.evaluate.judges import judge_texts, load_judge
from foretrace.evaluate.linear_judge import BUCKETS, CONFIG, TENSORS, LinearJudge, LinearJudgeConfig

RUDE, KIND, DULL = "you are awful and stupid", "what a lovely kind day", "the table is brown"
HASHED = 2 * BUCKETS  # features
TEXTS = [f"{text} {number}" for number in range(40) for text in (RUDE, KIND, DULL)]


def test_judge_of_two_classes(tmp_path: Path) -> None:
    labels = ["1" if RUDE in text else "0" for text in TEXTS]
    LinearJudge.train(TEXTS, labels, source="mine").save(tmp_path)
    judge = load_judge(str(tmp_path))
    scores = judge.score(["stupid and awful", "a lovely table"])
    assert scores[0] is not None
    assert scores[1] is not None
    assert scores[0] > 0.8 > 0.3 > scores[1]
    assert load_judge(str(tmp_path), label="0").score(["x"])[0] == pytest.approx(
        1 - float(judge.score(["x"])[0] or 0)
    )
    assert LinearJudge.load(tmp_path).config.source == "mine"


def test_judge_of_three_classes_is_the_same_after_loading(tmp_path: Path) -> None:
    labels = [["rude", "kind", "dull"][number % 3] for number in range(len(TEXTS))]
    judge = LinearJudge.train(TEXTS, labels)
    judge.save(tmp_path)
    probabilities = judge.probabilities([RUDE, KIND, DULL])
    assert [judge.config.classes[k] for k in probabilities.argmax(1)] == ["rude", "kind", "dull"]
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-6)
    loaded = LinearJudge.load(tmp_path)
    np.testing.assert_array_equal(loaded.probabilities([RUDE]), probabilities[:1])
    with pytest.raises(InvalidInputError, match="no class"):
        load_judge(str(tmp_path))


def test_one_label_and_unknown_versions_and_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="two labels"):
        LinearJudge.train(["a", "b"], ["1", "1"])
    save_small_judge(tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**content, "format_version": 9}))
    with pytest.raises(InvalidFileError, match="another version"):
        LinearJudge.load(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**content, "strange": 1}))
    with pytest.raises(InvalidFileError, match="strange"):
        LinearJudge.load(tmp_path)


class RecordingEncoder:
    """A stand-in for sentence-transformers that records what it is told to load."""

    loaded: list[tuple[str, dict[str, Any]]]

    def __init__(self, name: str, **options: Any) -> None:
        self.loaded.append((name, options))

    def encode(self, texts: list[str], **_: Any) -> np.ndarray[Any, Any]:
        return np.ones((len(texts), 4), np.float32)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> type[RecordingEncoder]:
    """Replace sentence-transformers by a class that records what it loads."""
    recording = type("Recording", (RecordingEncoder,), {"loaded": []})
    module = ModuleType("sentence_transformers")
    module.SentenceTransformer = recording  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    return recording


def save_small_judge(folder: str | Path, **settings: Any) -> None:
    """Save a judge of two classes with all-zero weights."""
    config = LinearJudgeConfig(("0", "1"), **settings)
    width = HASHED if config.encoder is None else HASHED + 4
    zeros = (np.zeros(shape, np.float32) for shape in (HASHED, (1, width), 1))
    LinearJudge(config, *zeros).save(folder)


def test_the_encoder_that_a_file_names_is_not_loaded(
    tmp_path: Path, encoder: type[RecordingEncoder]
) -> None:
    save_small_judge(tmp_path, encoder="somebody/some-encoder")
    with pytest.raises(InvalidInputError, match="encoder='somebody/some-encoder'"):
        load_judge(str(tmp_path)).score(["x"])
    with pytest.raises(InvalidInputError, match="encoder='somebody/some-encoder'"):
        LinearJudge.load(tmp_path).probabilities(["x"])
    assert encoder.loaded == []


def test_the_encoder_that_the_caller_names_is_loaded_without_its_code(
    tmp_path: Path, encoder: type[RecordingEncoder]
) -> None:
    save_small_judge(tmp_path, encoder="somebody/some-encoder")
    judge = load_judge(str(tmp_path), encoder="my-encoder")
    assert judge.score(["x"]) == [0.5]
    ((name, options),) = encoder.loaded
    assert name == "my-encoder"
    assert options["trust_remote_code"] is False
    assert options["model_kwargs"]["use_safetensors"] is True
    assert LinearJudge.load(tmp_path, encoder="mine").config.encoder == "mine"


def test_a_judge_without_embeddings_ignores_the_encoder(
    tmp_path: Path, encoder: type[RecordingEncoder]
) -> None:
    save_small_judge(tmp_path)
    assert load_judge(str(tmp_path), encoder="my-encoder").score(["x"]) == [0.5]
    assert encoder.loaded == []


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_may_be_strings(
    tmp_path: Path, kind: Callable[[Path], str | Path], encoder: type[RecordingEncoder]
) -> None:
    save_small_judge(kind(tmp_path / "judge"), encoder="e")
    judge = LinearJudge.load(kind(tmp_path / "judge"), encoder=kind(tmp_path / "encoder"))
    assert judge.config.encoder == str(tmp_path / "encoder")
    loaded = load_judge(kind(tmp_path / "judge"), encoder=kind(tmp_path / "encoder"))
    cache = tmp_path / "scores.jsonl"
    assert judge_texts(["x"], loaded, cache=kind(cache)).scores == [0.5]
    assert len(cache.read_text().splitlines()) == 1
    trained = LinearJudge.train(["a", "b"], ["0", "1"], encoder=kind(tmp_path / "encoder"))
    assert trained.config.encoder == str(tmp_path / "encoder")


def test_an_encoder_of_another_width_is_refused(
    tmp_path: Path, encoder: type[RecordingEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_judge(tmp_path, encoder="e")
    monkeypatch.setattr(encoder, "encode", lambda *_, **__: np.ones((1, 5), np.float32))
    with pytest.raises(InvalidInputError, match=r"width 5, but .* width 4"):
        LinearJudge.load(tmp_path, encoder="e").probabilities(["x"])


@pytest.mark.parametrize(
    "change",
    [
        {"classes": 5},
        {"classes": ["0"]},
        {"classes": ["0", "0"]},
        {"classes": ["0", 1]},
        {"classes": "01"},
        {"classes": None},
        {"encoder": 0},
        {"encoder_dtype": "hub"},
        {"encoder_dtype": None},
        {"source": 1},
    ],
)
def test_a_malformed_config_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save_small_judge(tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**content, **change}))
    with pytest.raises(InvalidFileError):
        LinearJudge.load(tmp_path)


def test_a_deeply_nested_config_is_refused(tmp_path: Path) -> None:
    save_small_judge(tmp_path)
    (tmp_path / CONFIG).write_text('{"classes": ' + "[" * 100_000)
    with pytest.raises(InvalidFileError):
        LinearJudge.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": torch.zeros(1, HASHED).to(torch.float8_e5m2)},
        {"weights": torch.zeros(1, HASHED).to(torch.float8_e4m3fn)},
        {"weights": torch.zeros(1, HASHED, dtype=torch.bfloat16)},
        {"weights": torch.zeros(1, HASHED, dtype=torch.int64)},
        {"weights": torch.zeros(1, HASHED - 1)},
        {"weights": torch.zeros(2, HASHED)},
        {"weights": torch.zeros(HASHED)},
        {"weights": torch.full((1, HASHED), torch.nan)},
        {"weights": None},
        {"idf": torch.zeros(HASHED - 1)},
        {"idf": torch.full((HASHED,), torch.inf)},
        {"idf": None},
        {"intercepts": torch.zeros(2)},
        {"intercepts": torch.zeros(1).to(torch.float8_e5m2)},
        {"intercepts": None},
    ],
)
def test_malformed_tensors_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None]
) -> None:
    save_small_judge(tmp_path)
    tensors = {
        "idf": torch.zeros(HASHED),
        "weights": torch.zeros(1, HASHED),
        "intercepts": torch.zeros(1),
    }
    changed = {**tensors, **change}
    save_file({k: v for k, v in changed.items() if v is not None}, tmp_path / TENSORS)
    with pytest.raises(InvalidFileError):
        LinearJudge.load(tmp_path)


def test_embeddings_are_features(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="needs the extra `evaluate`")
    from tiny_encoder import write_tiny_encoder

    encoder = str(write_tiny_encoder(tmp_path / "encoder", TEXTS))
    labels = ["1" if RUDE in text else "0" for text in TEXTS]
    judge = LinearJudge.train(TEXTS, labels, encoder=encoder)
    judge.save(tmp_path / "judge")
    assert judge.weights.shape[1] > HASHED
    loaded = LinearJudge.load(tmp_path / "judge", encoder=encoder).probabilities([RUDE])
    np.testing.assert_allclose(loaded, judge.probabilities([RUDE]), rtol=1e-5)
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        LinearJudge.train(TEXTS, labels, encoder=str(tmp_path / "none"))


def test_a_judge_of_a_suite_has_its_own_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sentence_transformers", reason="needs the extra `evaluate`")
    pytest.importorskip("yaml", reason="needs the extra `evaluate`")
    from foretrace.evaluate.scoring import Scorer
    from foretrace.evaluate.suite import JudgePlan, Table
    from tiny_encoder import write_tiny_encoder

    rows = [{"text": text, "label": int(RUDE in text)} for text in TEXTS]
    _io.write_lines(tmp_path / "texts.jsonl", rows)
    plan = JudgePlan(("mean",), Table("texts.jsonl"), encoder="$SECOND_ENCODER", judged="1")

    def score(texts: list[str]) -> list[float | None]:
        folders = (tmp_path, tmp_path, tmp_path / "judges")
        scorer = Scorer("rude", plan, *folders, "the evaluation's", "cpu", [{}] * len(texts))
        return [row[0] for row in scorer.score([[text] for text in texts])]

    with pytest.raises(InvalidInputError, match=r"\$SECOND_ENCODER.* is not set"):
        score([RUDE])
    encoder = str(write_tiny_encoder(tmp_path / "encoder", TEXTS))
    monkeypatch.setenv("SECOND_ENCODER", encoder)
    rude, blank = score([RUDE, " "])
    assert rude is not None
    assert rude > 0.5
    assert blank is None
    assert _io.read_json(tmp_path / "judges" / "rude" / "judge.json")["encoder"] == encoder
