"""Test the texts that a language model writes from a description."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from foretrace.chat import Prompt
from foretrace.engines.contrast import default_topics, instruction_words, write_contrast
from foretrace.engines.writing import BATCH, Written, write_texts
from foretrace.errors import InvalidFileError, InvalidInputError


@dataclass
class ScriptedWriter:
    """Stands in for a language model: says which instruction it got, and can break down."""

    name: str = "scripted"
    breaks_at: int = 10**9
    texts: Sequence[str] = ("Text {n} says {seed} {n} times, as asked.",)
    asked: list[str] = field(default_factory=list)

    def write(
        self, prompts: Sequence[Prompt], opposites: Sequence[Prompt] | None, seed: int
    ) -> list[Written]:
        if len(self.asked) >= self.breaks_at:
            raise KeyboardInterrupt
        written = []
        for number, prompt in enumerate(prompts):
            self.asked.append(str(prompt if isinstance(prompt, str) else prompt[-1]["content"]))
            text = self.texts[number % len(self.texts)].format(n=len(self.asked), seed=seed)
            written.append(Written(text, finished=True))
        return written


def test_both_sides_have_the_same_topics_and_wordings(tmp_path: Path) -> None:
    writer = ScriptedWriter()
    topics = ["a dog", "a cat", "tea"]
    contrast = write_contrast(
        writer, "formal", "casual", tmp_path / "w.jsonl", num_texts=240, topics=topics
    )
    assert len(writer.asked) == len(contrast.texts) == 240
    assert {text.score for text in contrast.texts if text.side == "for"} == {1.0}
    assert sorted({text.topic for text in contrast.texts}) == sorted(topics)
    formal = {text for text in writer.asked if "formal" in text}
    casual = {text.replace("casual", "formal") for text in writer.asked if "casual" in text}
    assert formal == casual
    assert len(formal) == 9  # all topics in all wordings


@pytest.mark.parametrize(
    ("wish", "first"),
    [("formal", "formal."), ("Complain about {topic}!", "Complain about a bicycle!")],
)
def test_the_instruction_and_its_default_contrast(tmp_path: Path, wish: str, first: str) -> None:
    writer = ScriptedWriter()
    write_contrast(writer, wish, None, tmp_path / "w.jsonl", num_texts=10)
    assert writer.asked[0].endswith(first)
    assert "bicycle" in writer.asked[5]
    assert not {"formal", "complain"} & set(writer.asked[5].lower().split())


def test_a_run_is_resumed_with_the_same_result(tmp_path: Path) -> None:
    whole = write_contrast(ScriptedWriter(), "formal", None, tmp_path / "whole.jsonl")
    broken, resumed = ScriptedWriter(breaks_at=2 * BATCH), ScriptedWriter()
    progress: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        write_contrast(broken, "formal", None, tmp_path / "w.jsonl")
    resumed.asked += [""] * 2 * BATCH  # it goes on counting
    again = write_contrast(
        resumed,
        "formal",
        None,
        tmp_path / "w.jsonl",
        on_progress=lambda *counts: progress.append(counts),
    )
    assert again == whole
    assert progress[-1] == (1000, 1000)
    for seed, num_texts, new in ((1, 1000, 1000), (0, 1100, 1100 - 6 * BATCH)):
        before = len(resumed.asked)
        file = tmp_path / "w.jsonl"
        write_contrast(resumed, "formal", None, file, seed=seed, num_texts=num_texts)
        assert len(resumed.asked) - before == new


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    write_texts(ScriptedWriter(), ["hello"], file)
    file.write_text(file.read_text().replace("key", "other"))
    with pytest.raises(InvalidFileError, match="something else"):
        write_texts(ScriptedWriter(), ["hello"], file)


def test_a_model_that_refuses_is_an_error(tmp_path: Path) -> None:
    refuses = ScriptedWriter(texts=["As an AI, I cannot.", "Hm"])
    with pytest.raises(InvalidInputError, match=r"0 usable texts for .* refusals, .* 'As an AI"):
        write_contrast(refuses, "formal", None, tmp_path / "w.jsonl", num_texts=20)


@pytest.mark.parametrize(("wish", "against"), [(" ", None), ("formal", ""), ("formal", "formal")])
def test_descriptions_must_differ(tmp_path: Path, wish: str, against: str | None) -> None:
    with pytest.raises(InvalidInputError, match="must not be empty, and must differ"):
        write_contrast(ScriptedWriter(), wish, against, tmp_path / "w.jsonl")


def test_words_and_topics() -> None:
    assert {"formal", "sentence", "casual", "bicycle"} <= set(instruction_words("formal", "casual"))
    assert "sea" not in instruction_words("about the sea", None)  # the name of a subject
    topics = default_topics()
    assert 60 <= len(topics) == len(set(topics)) <= 100
