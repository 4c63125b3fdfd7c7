"""German and Chinese texts, with a tokenizer that splits most of their characters into bytes."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")

import foretrace as ft
from foretrace.engines.cleaning import Selection, clean
from foretrace.evaluate import metrics
from forked import Run
from tiny_lm import byte_tokenizer, tiny_hmm, write_tiny_lm


class Language(NamedTuple):
    """Texts in a language: a beginning, a middle and an end make a sentence."""

    name: str
    beginnings: list[str]
    middles: list[str]
    good: list[str]
    bad: list[str]
    required: str
    similar: str
    """Shares bytes with the required text."""
    marker: str

    def texts(self, ends: list[str]) -> list[str]:
        return ["".join(parts) for parts in product(self.beginnings, self.middles, ends)]


LANGUAGES = [
    Language(
        "fröhlich",
        ["Die Tür", "Der Größte", "Das Mädchen", "Der König", "Die Bäuerin", "Ein Vögelchen"],
        [" war gestern", " ist heute früh", " wäre überall", " blieb für immer"],
        [" fröhlich und glücklich.", " schön, süß und gemütlich.", " überglücklich."],
        [" müde und böse.", " übel, öde und hässlich.", " unglücklich und mürrisch."],
        "Tür",
        "Tur",
        "Ä:",
    ),
    Language(
        "高兴",
        ["这扇门", "那个女孩", "老国王", "农夫", "一只小鸟", "我们的邻居"],
        ["昨天", "今天早上", "到处都", "永远"],
        ["很高兴。", "又美好又快乐。", "非常幸福。"],
        ["很难过。", "又疲倦又生气。", "非常不幸。"],
        "大海",
        "大浪",
        "答案",
    ),
]


class Setup(NamedTuple):
    """A tiny LM that was made for a language, and the options of commands that use it."""

    language: Language
    tokenizer: Any
    lm: Path
    hmm: Path
    folder: Path


@pytest.fixture(scope="module", params=LANGUAGES, ids=["German", "Chinese"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    language: Language = request.param
    folder = tmp_path_factory.mktemp("language")
    tokenizer = byte_tokenizer(language.texts(language.good + language.bad), 300)
    write_tiny_lm(folder / "lm", tokenizer)
    tiny_hmm(tokenizer).save_pretrained(folder / "hmm")
    return Setup(language, tokenizer, folder / "lm", folder / "hmm", folder / "attributes")


def fit(setup: Setup, run: Run, folder: Path) -> ft.Attribute:
    """Fit the attribute of the language by the command line, unless it was fitted before."""
    language = setup.language
    path = setup.folder / f"{language.name}.safetensors"
    if not path.exists():
        rows = [{"text": text, "score": 0.95} for text in language.texts(language.good)]
        rows += [{"text": text, "score": 0.05} for text in language.texts(language.bad)]
        texts = folder / "texts.jsonl"
        texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        setup.folder.mkdir(exist_ok=True)
        done = run("fit", texts, "--tokenizer", setup.lm, "--out", path)
        assert done.code == 0, done.err
    return ft.Attribute.load(path)


def test_fit(setup: Setup, run: Run, tmp_path: Path) -> None:
    language, attribute = setup.language, fit(setup, run, tmp_path)
    assert attribute.name == language.name
    good, bad = (
        attribute.probability(setup.tokenizer(language.texts(ends)).input_ids)
        for ends in (language.good, language.bad)
    )
    assert good.min() > bad.max()
    shown = run("attribute", "show", setup.folder / f"{language.name}.safetensors")
    assert language.name in shown.out


def test_contains_and_markers(setup: Setup) -> None:
    language, tokenizer = setup.language, setup.tokenizer
    attribute = ft.contains(language.required, tokenizer)
    texts = [f"a{language.required}b", f"a{language.similar}b", language.required[:-1]]
    assert attribute.probability(tokenizer(texts).input_ids).tolist() == [1.0, 0.0, 0.0]
    marker = ft.marker(language.marker, tokenizer)
    assert marker.is_suffix_of(tokenizer(f"x{language.marker}").input_ids)
    assert not marker.is_suffix_of(tokenizer(f"{language.marker}x").input_ids)


def test_generate_and_explain(setup: Setup, run: Run, tmp_path: Path) -> None:
    language = setup.language
    fit(setup, run, tmp_path)
    options = [setup.lm, "--hmm", setup.hmm, "--attributes", setup.folder, "--level", "mild"]
    options += ["--max-new-tokens", 24, "--prompt", language.beginnings[0]]
    goal = f'{language.name} & contains("{language.required}")'
    done = run("generate", *options, "--goal", goal)
    assert done.code == 0, done.err
    assert language.required in done.out
    page = tmp_path / "page.html"
    text = f"{language.middles[0]}{language.marker}{language.required}{language.good[0]}"
    settings = ["--text", text, "--after", language.marker, "--html", page]
    done = run("explain", *options, "--goal", goal, *settings)
    assert done.code == 0, done.err
    assert text in done.out
    html = page.read_text("utf-8")
    assert "�" not in html  # a candidate that is a part of a character is shown as bytes
    pieces = re.findall('<span class="token"[^>]*>([^<]*)</span>', html)
    assert "".join(pieces) == text


@pytest.mark.parametrize("language", LANGUAGES, ids=["German", "Chinese"])
def test_words_are_found_without_spaces_between_them(language: Language) -> None:
    texts = language.texts(language.good)
    selection = Selection(f"Write a text. It must be {language.name}.", language.name)
    assert selection.fault(clean(f"“{texts[0]}”", finished=True)) is None
    assert selection.fault(texts[0]) == "near duplicates"
    assert selection.fault(language.required) == "empty or cut off"
    assert metrics.words([texts[:1]]).value > 3
    assert metrics.repetition([[f"{texts[0]} {texts[0]}"]], n=2).value > 0.4
