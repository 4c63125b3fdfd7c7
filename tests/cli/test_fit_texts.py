"""`foretrace fit` without scored texts: from a description, from samples, from a server."""

import json
from pathlib import Path
from typing import Any

import pytest

from fake_server import chat_answer, fake_server
from foretrace.attribute import Attribute
from forked import Run
from parity_texts import scored_texts
from tiny_lm import WORDS, chat_tokenizer, write_tiny_lm


@pytest.fixture(scope="module")
def chat_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny LM with a chat template."""
    return write_tiny_lm(tmp_path_factory.mktemp("chat-lm"), chat_tokenizer())


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A scorer that prefers texts with `w7`."""
    code = "def score(texts):\n    return [0.9 if 'w7' in t.split() else 0.2 for t in texts]\n"
    (tmp_path / "w7_scorer.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "w7_scorer:score"


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_from_a_description(run: Run, chat_lm: Path, tmp_path: Path) -> None:
    out, texts = tmp_path / "formal.safetensors", tmp_path / "formal.texts.jsonl"
    command = ["fit", "--describe", "w9 formal", "--against", "w8", "--lm", chat_lm]
    command += ["--num-texts", 160, "--out", out]
    done = run(*command)
    assert done.code == 0, done.err
    written = rows(texts)
    assert {row["side"]: row["score"] for row in written} == {"for": 1.0, "against": 0.0}
    assert all(row["text"] and row["topic"] for row in written)
    attribute = Attribute.load(out)
    source = attribute.config.fit["source"]
    assert (source["described"], source["against"]) == ("w9 formal", "w8")
    vocabulary = chat_tokenizer().get_vocab()
    rewarded = {*attribute.top_tokens(64)} if not attribute.evidence else set()
    tokens = {effect.token for effect in rewarded}
    tokens |= {token for part in attribute.evidence for token in part.tokens.tolist()}
    assert tokens.isdisjoint({vocabulary["w8"], vocabulary["w9"]})

    again = run(*command)
    assert again.code == 0, again.err
    assert rows(texts) == written
    texts.write_text("".join(json.dumps(row) + "\n" for row in written[1:]))
    refused = run(*command)
    assert refused.code == 1
    assert "other texts or scores" in refused.err
    fitted = run("fit", texts, "--lm", chat_lm, "--out", out)
    assert fitted.code == 0, fitted.err
    assert Attribute.load(out).config.fit["source"]["data"] == texts.name


def test_samples_of_the_lm_are_scored(run: Run, tiny_lm: Path, scorer: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2\nw3\n")
    for name, options in (("openings", []), ("prompts", ["--prompts", prompts])):
        out = tmp_path / f"{name}.safetensors"
        command = ["fit", "--lm", tiny_lm, "--scorer", scorer, "--num-texts", 100, "--out", out]
        done = run(*command, *options)
        assert done.code == 0, done.err
        samples = rows(tmp_path / f"{name}.texts.jsonl")
        assert len(samples) > 80
        assert {row["score"] for row in samples} == {0.2, 0.9}
        assert all(("w7" in row["text"].split()) == (row["score"] > 0.5) for row in samples)
        if options:
            assert {row["prompt"] for row in samples} == {"w1 w2", "w3"}
        strongest = Attribute.load(out).top_tokens(1)
        assert not strongest or strongest[0].token == WORDS.index("w7")
    assert not (tmp_path / ".samples.jsonl").exists()  # there are no samples beside the texts


@pytest.mark.parametrize("with_hmm", [False, True])
def test_an_lm_adds_levels_and_a_verdict(
    run: Run, scorer: str, steered: list[str], tmp_path: Path, with_hmm: bool
) -> None:
    lm, *hmm = steered[:3]
    out = tmp_path / "a.safetensors"
    command = ["fit", "--lm", lm, "--scorer", scorer, "--num-texts", 100, "--out", out]
    done = run(*command, "--objective", "evidence", *(hmm if with_hmm else []))
    assert done.code == 0, done.err
    assert ("the next token alone" in done.err) is not with_hmm
    measured = Attribute.load(out)
    assert measured.report is not None
    assert measured.config.fit["price_aware"]
    assert measured.report.verdict in done.out
    assert list(measured.config.levels) == ["mild", "medium", "strong"]
    used = hmm[1] if with_hmm else "token frequencies"
    assert measured.config.fit["calibration"]["hmm"] == used
    assert "context" not in measured.config.fit


def test_context_is_fitted_with_the_lm(run: Run, tiny_lm: Path, tmp_path: Path) -> None:
    texts, scores = scored_texts(meaningful=True)
    data, out = tmp_path / "even.jsonl", tmp_path / "even.safetensors"
    pairs = zip(texts, scores, strict=True)
    lines = [json.dumps({"text": text, "score": score}) for text, score in pairs]
    data.write_text("\n".join(lines) + "\n")
    command = ["fit", data, "--lm", tiny_lm, "--objective", "evidence", "--out", out]
    done = run(*command, "--context")
    assert done.code == 0, done.err
    attribute = Attribute.load(out)
    context = attribute.config.fit["context"]
    assert context["summary"] in " ".join(done.out.split())
    assert (attribute.context is not None) is context["kept"]
    assert attribute.report is not None
    assert not out.with_suffix(".states").exists()


def test_a_server_scores_texts(
    run: Run, tiny_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body["messages"][0]["content"])
        if "w9" in asked[-1]:
            return 400, {}
        return chat_answer("Yes", first_token={"Yes": -0.1 if "w7" in asked[-1] else -5, "No": -1})

    data, out = tmp_path / "texts.jsonl", tmp_path / "a.safetensors"
    texts = [f"w{number} w{number % 2 + 6}" for number in range(9, 60)] * 2
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with fake_server(answer) as url:
        options = ["--scorer-url", url, "--scorer-model", "big", "--scorer-prompt", "Good?"]
        command = ["fit", data, "--tokenizer", tiny_lm, *options, "--out", out]
        done = run(*command)
        assert done.code == 0, done.err
        assert "2 texts left out: the scorer failed (it gave no score)" in done.out
        before = len(asked)
        assert run(*command).code == 0
        assert len(asked) == before + 2  # how the server answers, and the text without a score
    assert Attribute.load(out).config.fit["source"]["scorer"] == "big"
    stopped = run(*command)
    assert stopped.code == 1
    assert "cannot be reached" in stopped.err


def test_a_server_writes_texts(run: Run, tiny_lm: Path, tmp_path: Path) -> None:
    numbers = iter(range(10**6))

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        number, word = next(numbers), "w7" if "formal" in body["messages"][0]["content"] else "w8"
        return chat_answer(" ".join([word, *(f"w{number * k % 50 + 9}" for k in (1, 3, 7, 9))]))

    out, topics = tmp_path / "formal.safetensors", tmp_path / "topics.txt"
    topics.write_text("a dog\na cat\n")
    with fake_server(answer) as url:
        options = ["--writer-url", url, "--writer-model", "big", "--topics", topics]
        command = ["fit", "--describe", "formal", "--tokenizer", tiny_lm, "--num-texts", 100]
        done = run(*command, *options, "--out", out)
    assert done.code == 0, done.err
    assert {row["topic"] for row in rows(tmp_path / "formal.texts.jsonl")} == {"a dog", "a cat"}
    assert Attribute.load(out).config.fit["source"]["writer"].startswith("big at http")


DESCRIBED = ["--describe", "formal", "--lm", "x"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "Pass a file of texts, --describe, or --lm with a scorer"),
        (["--lm", "x"], "Pass a file of texts"),
        (["data.csv", *DESCRIBED], "has the texts already"),
        (["data.csv", "--tokenizer", "x", "--num-texts", "5"], "has the texts already"),
        (["data.csv", "--tokenizer", "x", "--against", "y"], "are for --describe"),
        (
            ["data.csv", "--tokenizer", "x", "--prompts", "p.txt"],
            "--prompts are for samples, or for the verdict",
        ),
        (["--describe", "formal", "--tokenizer", "x"], "--describe needs --lm, or --writer-url"),
        ([*DESCRIBED, "--writer-url", "http://x"], "--writer-url and --writer-model go together"),
        ([*DESCRIBED, "--scorer-url", "http://x"], "go together"),
        ([*DESCRIBED, "--scorer", "a:b", "--scorer-url", "u", "--scorer-model", "m"], "together"),
        ([*DESCRIBED, "--label", "toxic"], "are for a --scorer"),
        ([*DESCRIBED, "--by", "author"], "no meaning with it"),
        ([*DESCRIBED, "--tokenizer", "y"], "leave out --tokenizer"),
        (["data.csv"], "Pass --lm, or --tokenizer"),
        ([*DESCRIBED, "--topics", "no-such-file"], "cannot be read"),
    ],
)
def test_options_that_do_not_go_together(
    run: Run, tmp_path: Path, options: list[str], expected: str
) -> None:
    done = run("fit", *options, "--out", tmp_path / "a.safetensors")
    assert done.code == 2
    assert expected in done.err
