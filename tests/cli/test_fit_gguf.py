"""`foretrace fit` for the LM of a GGUF file, which has no HMM, and steering with the result."""

import json
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="needs the extra `llama-cpp`")

from foretrace.attribute import Attribute
from forked import Run

pytestmark = pytest.mark.llama_cpp

THINGS = "film", "song", "dinner", "book", "room", "game", "walk", "town", "play", "show"
WORDS = {1: ("wonderful", "lovely", "great", "superb"), 0: ("awful", "boring", "bad", "poor")}


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """Sentences that praise things, and sentences that do not."""
    file = tmp_path / "scored.jsonl"
    rows = [
        {"text": f"The {thing} was {word}, and so was the {other}.", "score": score}
        for score, words in WORDS.items()
        for word in words
        for thing in THINGS
        for other in THINGS[:3]
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_similar_words_share_their_rewards(
    run: Run, scored: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    out = tmp_path / "praise.safetensors"
    done = run("fit", scored, "--lm", smollm2_gguf, "--objective", "evidence", "--out", out)
    assert done.code == 0, done.err
    assert "goals look at the next token alone" in done.err
    attribute = Attribute.load(out)
    assert len(attribute.top_tokens(100)) == 100  # many more words than the texts have
    steered = run(
        "generate", smollm2_gguf, "--attributes", tmp_path, "--goal", "praise", "--prompt",
        "The film was", "--max-new-tokens", "4", "--json",
    )  # fmt: skip
    assert steered.code == 0, steered.err
    assert json.loads(steered.out)["price"] > 0


def test_a_gguf_file_writes_no_texts(run: Run, smollm2_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "formal.safetensors"
    done = run("fit", "--describe", "formal", "--lm", smollm2_gguf, "--out", out)
    assert done.code == 2
    assert "--writer-url" in " ".join(done.err.replace("│", " ").split())
