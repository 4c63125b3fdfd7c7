"""Judges that are trained: they learn, and are the same once saved."""

import json
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.evaluate.judges import load_judge
from foretrace.evaluate.linear_judge import CONFIG, LinearJudge

RUDE, KIND, DULL = "you are awful and stupid", "what a lovely kind day", "the table is brown"
TEXTS = [f"{text} {number}" for number in range(40) for text in (RUDE, KIND, DULL)]


def test_two_classes(tmp_path: Path) -> None:
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


def test_three_classes_and_a_saved_judge_is_the_same(tmp_path: Path) -> None:
    labels = [["rude", "kind", "dull"][number % 3] for number in range(len(TEXTS))]
    judge = LinearJudge.train(TEXTS, labels)
    judge.save(tmp_path)
    found = judge.probabilities([RUDE, KIND, DULL])
    assert [judge.config.classes[k] for k in found.argmax(1)] == ["rude", "kind", "dull"]
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
    np.testing.assert_array_equal(LinearJudge.load(tmp_path).probabilities([RUDE]), found[:1])
    with pytest.raises(InvalidInputError, match="no class"):
        load_judge(str(tmp_path))


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="two labels"):
        LinearJudge.train(["a", "b"], ["1", "1"])
    LinearJudge.train(TEXTS, ["1" if RUDE in text else "0" for text in TEXTS]).save(tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**content, "format_version": 9}))
    with pytest.raises(InvalidFileError, match="another version"):
        LinearJudge.load(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**content, "strange": 1}))
    with pytest.raises(InvalidFileError, match="strange"):
        LinearJudge.load(tmp_path)


def test_embeddings_help_where_words_do_not(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="needs the extra `evaluate`")
    from tiny_encoder import write_tiny_encoder

    encoder = str(write_tiny_encoder(tmp_path / "encoder", TEXTS))
    labels = ["1" if RUDE in text else "0" for text in TEXTS]
    judge = LinearJudge.train(TEXTS, labels, encoder=encoder)
    judge.save(tmp_path / "judge")
    assert judge.weights.shape[1] > 2 * judge.config.buckets
    again = LinearJudge.load(tmp_path / "judge").probabilities([RUDE])
    np.testing.assert_allclose(again, judge.probabilities([RUDE]), rtol=1e-5)
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        LinearJudge.train(TEXTS, labels, encoder=str(tmp_path / "none"))
