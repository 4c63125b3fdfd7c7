"""`foretrace fit` and `foretrace attribute`."""

import json
import random
from pathlib import Path

import pytest
import torch

from foretrace.attribute import Attribute, AttributeStore, ContextReward
from forked import Run
from tiny_lm import WORDS, word_tokenizer, write_tiny_lm

W7 = WORDS.index("w7")


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """Texts of five words and a sixth that identifies the author; texts with `w7` are rude."""
    rng = random.Random(0)
    rows: list[dict[str, object]] = []
    for number in range(400):
        author = number % 3
        words = [f"w{rng.randrange(5, 40)}" for _ in range(5)]
        rude = 0.9 if "w7" in words else 0.1
        text = " ".join([*words, f"w{author + 1}"])
        rows.append({"text": text, "rudeness": rude, "author": f"Author {author}"})
    return write(tmp_path / "scored.jsonl", rows)


def test_fit_then_show(run: Run, scored: Path, tiny_lm: Path, tmp_path: Path) -> None:
    out = tmp_path / "polite.safetensors"
    done = run(
        "fit", scored, "--tokenizer", tiny_lm, "--score", "rudeness", "--invert", "--out", out
    )
    assert done.code == 0, done.err
    assert "fitted in" in done.out
    attribute = Attribute.load(out)
    assert attribute.name == "polite"
    assert attribute.top_tokens(1)[0].token == W7
    shown = run("attribute", "show", out, "--tokenizer", tiny_lm, "--plot", tmp_path / "fit.png")
    assert shown.code == 0, shown.err
    assert "'w7'" in shown.out
    assert "AUC, held out" in shown.out
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
    assert f"{W7} " in run("attribute", "show", out).out


def test_options_are_passed_to_the_fit(
    run: Run, scored: Path, tiny_lm: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.safetensors"
    options = ["--terms", 2, "--scale", 2, "--shift", -1, "--penalty", 0.5]
    options += ["--name", "rude", "--window", 3, "--seed", 3, "--plot", tmp_path / "a.png"]
    done = run("fit", scored, "--tokenizer", tiny_lm, "--score", "rudeness", "--out", out, *options)
    assert done.code == 0, done.err
    facts = Attribute.load(out).config.fit
    assert facts["transform"] == {"scale": 2.0, "shift": -1.0}
    assert (facts["terms"], facts["penalty"]) == (2, 0.5)
    assert facts["texts"] + facts["held_out_texts"] == 400
    assert facts["windows"] + facts["held_out_windows"] == 800  # two of each text
    assert facts["source"]["data"] == "scored.jsonl"
    assert (tmp_path / "a.png").exists()


def test_one_attribute_per_author(run: Run, scored: Path, tiny_lm: Path, tmp_path: Path) -> None:
    out = tmp_path / "authors"
    done = run("fit", scored, "--tokenizer", tiny_lm, "--by", "author", "--out", out)
    assert done.code == 0, done.err
    assert "3 attributes" in done.out
    assert "Chose evidence: the right one of 3 labels is first for" in done.out
    store = AttributeStore(out)
    assert list(store) == ["Author 0", "Author 1", "Author 2"]
    assert store["Author 1"].top_tokens(1)[0].token == WORDS.index("w2")


def test_evidence_is_fitted_and_shown_without_kept_words(
    run: Run, scored: Path, tiny_lm: Path, tmp_path: Path
) -> None:
    out, words = tmp_path / "rude.safetensors", tmp_path / "words.txt"
    words.write_text("# left out\nW8\nno-such-word\n")
    options = ["--score", "rudeness", "--objective", "evidence", "--keep", words, "--out", out]
    done = run("fit", scored, "--tokenizer", tiny_lm, *options, "--plot", tmp_path / "fit.png")
    assert done.code == 0, done.err
    assert "1 tokens of 2 words do not decide" in done.out
    assert (tmp_path / "fit.png").exists()
    attribute = Attribute.load(out)
    assert WORDS.index("w8") not in attribute.evidence[0].tokens.tolist()
    assert attribute.config.fit["keep"] == 1
    shown = run("attribute", "show", out, "--tokenizer", tiny_lm, "--tokens", 3).out
    lines = shown.splitlines()
    header = next(index for index, line in enumerate(lines) if "against" in line)
    assert "'w7'" in lines[header + 1]
    assert "+" in lines[header + 1]
    assert lines[header + 4].startswith("No verdict: `foretrace calibrate`")
    assert len(lines) == header + 5
    assert "tokens with reward" in shown
    context = ContextReward(torch.ones(2, 5), torch.ones(2, 4), "sha256:0123456789abcdef")
    attribute.with_context(context).save(out)
    shown = " ".join(run("attribute", "show", out).out.split())
    assert "context reward rank 2, 4 dimensions, for the LM whose head is sha256:01234567" in shown


def test_group_terms_among_the_strongest_tokens_are_a_warning(run: Run, tmp_path: Path) -> None:
    terms = ["<|endoftext|>", "w0", "women", "other"]
    lm = write_tiny_lm(tmp_path / "lm", word_tokenizer(terms))
    rows: list[dict[str, object]] = []
    for number in range(200):
        word, score = ("women", 0) if number % 2 else ("other", 1)
        rows.append({"text": f"w0 {word}", "score": score})
    data, out = write(tmp_path / "data.jsonl", rows), tmp_path / "a.safetensors"
    warning = "Warning: Terms for groups of people are among the 50 strongest tokens: women."
    for objective in ("evidence", "cross-entropy"):
        options = ["--objective", objective, "--out", out]
        done = run("fit", data, "--tokenizer", lm, *options)
        assert warning in done.out, done.err
        assert warning in run("attribute", "show", out).out
        kept = run("fit", data, "--tokenizer", lm, *options, "--keep", "groups")
        assert "Terms for groups" not in kept.out, kept.err


def test_scores_are_cached(
    run: Run, scored: Path, tiny_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "length_scorer.py").write_text(
        "from pathlib import Path\n"
        "def score(texts):\n"
        f"    broken = Path({str(tmp_path / 'broken')!r}).exists()\n"
        "    words = [text.split() for text in texts]\n"
        "    return [None if broken or 'w9' in text else float('w7' in text) for text in words]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "rude.safetensors"
    command = [
        "fit",
        scored,
        "--tokenizer",
        tiny_lm,
        "--scorer",
        "length_scorer:score",
        "--out",
        out,
    ]
    done = run(*command)
    assert done.code == 0, done.err
    assert "texts left out" in done.out
    cache_file = tmp_path / "rude.scores.jsonl"
    assert len(cache_file.read_text().splitlines()) < 400
    (tmp_path / "broken").touch()
    again = run(*command)
    assert again.code == 0, again.err
    other = run(*command[:-1], tmp_path / "other.safetensors")
    assert "has scored none" in other.err


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([{"text": "w1", "score": 1}, {"text": " ", "score": 0}], [], "1 of 2 texts are empty"),
        (
            [{"text": "w1", "score": 1}, {"text": "w2", "score": 7}],
            [],
            "row 2 is '7', not a probability",
        ),
        ([{"text": "w1", "score": 1}] * 20, [], "scores are equal"),
        ([{"text": "w1", "score": 1}], ["--text", "body"], "has no 'body'; it has text, score"),
        ([{"text": "w1", "score": 1}], ["--by", "who"], "has no 'who'"),
        ([{"text": "w1", "score": 1}], ["--scale", "-1"], "scale above 0"),
        ([{"text": "w1", "score": 1}], ["--terms", "2", "--objective", "log-mse"], "log-mse fits"),
        ([{"text": "w1", "score": 1}], ["--window", "0"], "window"),
        ([{"text": "w1", "score": 1}], ["--scorer", "no_such:judge"], "cannot be imported"),
    ],
)
def test_bad_input_is_a_one_line_error(
    run: Run,
    tmp_path: Path,
    tiny_lm: Path,
    rows: list[dict[str, object]],
    options: list[str],
    expected: str,
) -> None:
    data = write(tmp_path / "data.jsonl", rows)
    done = run("fit", data, "--tokenizer", tiny_lm, "--out", tmp_path / "a", *options)
    assert done.code == 1
    assert expected in done.err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--by", "author", "--plot", "p.png"], "no meaning with it"),
        (["--label", "toxic"], "are for a --scorer"),
        (["--context"], "--context needs --lm"),
        (["--out", "."], "is a folder"),
        (["--keep", "no-such-file"], "one entry per line"),
    ],
)
def test_options_without_effect_are_errors(
    run: Run, scored: Path, options: list[str], expected: str
) -> None:
    done = run("fit", scored, "--tokenizer", "x", "--out", "y", *options)
    assert done.code == 2
    assert expected in done.err


def test_name_is_not_parsed_as_markup(
    run: Run, scored: Path, tiny_lm: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.safetensors"
    options = ["--score", "rudeness", "--name", "Mia [/cat]", "--out", out]
    done = run("fit", scored, "--tokenizer", tiny_lm, *options)
    assert "Mia [/cat]" in done.out, done.err


def test_another_tokenizer_is_a_one_line_error(
    run: Run, scored: Path, tiny_lm: Path, tmp_path: Path
) -> None:
    other = write_tiny_lm(tmp_path / "other", word_tokenizer([WORDS[0], *reversed(WORDS[1:])]))
    out = tmp_path / "a.safetensors"
    run("fit", scored, "--tokenizer", tiny_lm, "--score", "rudeness", "--out", out)
    shown = run("attribute", "show", out, "--tokenizer", other)
    assert shown.code == 1
    assert "another tokenizer" in shown.err
    missing = run("attribute", "show", out, "--tokenizer", tmp_path / "none")
    assert "There is no file or folder" in missing.err
