"""Samples of an LM, scored by a classifier, teach the rewards of an attribute."""

import random
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import PreTrainedModel

from foretrace.engines.transformers.judged_runs import fit_judge
from foretrace.engines.transformers.samples import (
    NUM_TOKENS,
    Classifiers,
    TeachingSamples,
    fit_teacher,
    sample_texts,
)
from foretrace.engines.transformers.writer import LMWriter
from tiny_lm import WORDS, word_tokenizer

TOKENIZER = word_tokenizer()


def two_sides(count: int) -> tuple[list[str], list[float]]:
    """Return texts of either half of the words, and which half."""
    source = random.Random(0)
    sides = WORDS[1:32], WORDS[20:]
    texts = [" ".join(source.choices(sides[i % 2], k=12)) for i in range(count)]
    return texts, [float(i % 2) for i in range(count)]


def test_samples_continue_prompts_or_openings(model: PreTrainedModel, tmp_path: Path) -> None:
    writer = LMWriter(model, TOKENIZER, "tiny", max_new_tokens=6, top_p=1.0)
    prompted = sample_texts(writer, ["w1 w2", "w3"], tmp_path / "a.jsonl", count=8)
    assert [one.prompt for one in prompted] == ["w3"] * 4 + ["w1 w2"] * 4  # by length
    opened = sample_texts(writer, [], tmp_path / "b.jsonl", count=7)
    assert len({one.prompt for one in opened}) == 2  # five samples continue an opening


def test_an_interrupted_call_continues(model: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    first = TeachingSamples.draw(model, TOKENIZER, file, prompts=["w1", "w2"], count=200)
    lines = file.read_text().splitlines()
    file.write_text(lines[0] + "\n")
    again = TeachingSamples.draw(model, TOKENIZER, file, prompts=["w1", "w2"], count=200)
    assert file.read_text().splitlines() == lines
    assert [list(ids) for ids in first.texts] == [list(ids) for ids in again.texts]
    assert max(map(len, again.texts)) == NUM_TOKENS
    np.testing.assert_allclose(first.states, again.states, rtol=1e-5)


def test_samples_are_read_once(model: PreTrainedModel, tmp_path: Path) -> None:
    """Their states are kept, and read again if the samples or the LM are others."""
    stages: list[str] = []

    def draw(lm: PreTrainedModel, count: int) -> TeachingSamples:
        stages.clear()
        return TeachingSamples.draw(
            lm,
            TOKENIZER,
            tmp_path / "samples.jsonl",
            count=count,
            on_progress=lambda stage, *_: stages.append(stage),
        )

    first = draw(model, 8)
    assert "read" in stages
    again = draw(model, 8)
    assert "read" not in stages
    np.testing.assert_array_equal(first.states, again.states)
    draw(model, 9)
    assert "read" in stages
    draw(deepcopy(model).double(), 9)
    assert "read" in stages
    trained = deepcopy(model)
    with torch.no_grad():  # as by an adapter that is merged: the head stays as it is
        trained.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    draw(trained, 9)
    assert "read" in stages
    (tmp_path / "samples.states").write_bytes(b"damaged")
    draw(trained, 9)
    assert "read" in stages


def test_teacher_and_judge_have_no_text_in_common(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = []

    def record(lm: PreTrainedModel, tokenizer: object, texts: list[str], *rest: object) -> object:
        halves.append(set(texts))
        return fit_judge(lm, tokenizer, texts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("foretrace.engines.transformers.samples.fit_judge", record)
    texts, scores = two_sides(200)
    texts, scores = texts * 2, scores * 2  # every text has a duplicate
    teacher, judge = Classifiers.fit(model, TOKENIZER, texts, scores)
    assert teacher is not None
    assert judge is not None
    first, second = halves
    assert not first & second
    assert first | second == set(texts)
    alone = fit_teacher(model, TOKENIZER, texts, scores)
    assert alone is not None
    assert halves[2:] == [first]
    assert alone.score(texts[:5]) == teacher.score(texts[:5])


def test_few_or_meaningless_texts_teach_nothing(model: PreTrainedModel) -> None:
    texts, scores = two_sides(60)  # fewer than 20 of each side in a half
    teacher, judge = Classifiers.fit(model, TOKENIZER, texts, scores)
    assert teacher is None
    assert judge is not None
    assert fit_teacher(model, TOKENIZER, texts, scores) is None
    assert Classifiers.fit(model, TOKENIZER, texts[:4], scores[:4]) == (None, None)
    texts, _ = two_sides(600)
    chance = [float(random.Random(text).random() < 0.5) for text in texts]
    assert Classifiers.fit(model, TOKENIZER, texts, chance).teacher is None
    assert fit_teacher(model, TOKENIZER, texts, chance) is None
