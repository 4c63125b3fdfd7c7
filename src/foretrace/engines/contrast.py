"""Texts with and without an attribute, written by a language model from a description."""

import os
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from foretrace.attribute.fitting.words import parse_words
from foretrace.chat import Messages, as_messages
from foretrace.engines.cleaning import Selection, clean, words
from foretrace.engines.writing import OnProgress, Writer, Written, write_texts
from foretrace.errors import InvalidInputError

TOPIC, WISH = "{topic}", "{wish}"
FOR, AGAINST = "for", "against"
COPIES = 5  # texts of one instruction
MIN_USABLE = 0.05  # of the texts of a side
WORDINGS = (  # with a wish, and without
    ("Write one sentence about {topic}. It must be {wish}.", "Write one sentence about {topic}."),
    (
        "Say something about {topic} in one or two sentences. Make it {wish}.",
        "Say something about {topic} in one or two sentences.",
    ),
    (
        "Topic: {topic}. Write two short sentences, {wish}.",
        "Topic: {topic}. Write two short sentences.",
    ),
)


class ContrastText(NamedTuple):
    """A text of one side.

    Attributes:
        text: The text.
        side: `for` if it should have the attribute, else `against`.
        topic: Its topic.
        score: 1 for a text with the attribute, 0 for one without.
    """

    text: str
    side: str
    topic: str
    score: float


class Contrast(NamedTuple):
    """The texts of both sides.

    Attributes:
        texts: The usable texts.
        removed: How many texts were removed, by reason.
    """

    texts: list[ContrastText]
    removed: Counter[str]


class _Task(NamedTuple):
    side: str
    topic: str
    template: str  # of the instruction, with TOPIC
    opposite: str  # of the other side
    wish: str | None

    def chat(self, template: str) -> Messages:
        return as_messages(template.replace(TOPIC, self.topic))


def write_contrast(
    writer: Writer,
    description: str,
    against: str | None,
    file: str | os.PathLike[str],
    *,
    num_texts: int = 1000,
    topics: Sequence[str] | None = None,
    seed: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> Contrast:
    """Have a language model write texts that fit a description, and texts that do not.

    Both sides are about the same topics. Refusals, echoes of the instruction, texts without the end
    of a sentence, placeholders and near duplicates are removed.

    Args:
        writer: The language model.
        description: What texts should be: *formal*, *about the sea*, *a complaint*. If it contains
            `{topic}`, it is the whole instruction: *Write a letter of complaint about {topic}.*
        against: What the other texts should be. None: texts about the same topics without a wish.
        file: The file that holds what was written so far.
        num_texts: The number of texts to write, of both sides together.
        topics: The topics, as they follow *about*. Default: everyday things, in English.
        seed: The random seed.
        on_progress: Called after each batch with the numbers of texts written and of all.

    Returns:
        The texts, and how many were removed.

    Raises:
        InvalidInputError: If a description is empty, both are equal, or almost no text is usable.
        InvalidFileError: If the file holds something else.

    Example:
        >>> from foretrace.engines.contrast import write_contrast
        >>> from foretrace.engines.writing import Written
        >>> class Scripted:
        ...     name = "scripted"
        ...     def write(self, prompts, opposites, seed):
        ...         asked = [prompt[0]["content"] for prompt in prompts]
        ...         opening = {True: "Dear Sir or Madam", False: "hey dude"}
        ...         return [Written(opening["formal" in text] + ", hello.", True) for text in asked]
        >>> contrast = write_contrast(Scripted(), "formal", None, folder / "w.jsonl", num_texts=20)
        >>> contrast.texts[0]
        ContrastText(text='Dear Sir or Madam, hello.', side='for', topic='a bicycle', score=1.0)
        >>> contrast.removed
        Counter({'near duplicates': 16})
    """
    wishes = [description] if against is None else [description, against]
    if not all(wish.strip() for wish in wishes) or len(set(wishes)) < len(wishes):
        raise InvalidInputError(
            "A description must not be empty, and must differ from what it is held against."
        )
    tasks = _tasks(description, against, topics or default_topics(), num_texts)
    written = write_texts(
        writer,
        [task.chat(task.template) for task in tasks],
        file,
        opposites=[task.chat(task.opposite) for task in tasks],
        seed=seed,
        on_progress=on_progress,
    )
    contrast = _select(tasks, written)
    for side in (FOR, AGAINST):
        first = next(text for task, text in zip(tasks, written, strict=True) if task.side == side)
        usable = sum(text.side == side for text in contrast.texts)
        if usable <= MIN_USABLE * len(tasks) / 2:
            raise InvalidInputError(
                f"{writer.name} wrote {usable} usable texts {side} the description, of "
                f"{len(tasks) // 2}. Removed: {summary(contrast.removed)}. The first text: "
                f"'{first.text.strip()[:100]}'. Describe it in other words, or use a larger model."
            )
    return contrast


def default_topics() -> list[str]:
    """Return everyday things to write about, in English, as they follow *about*.

    Returns:
        The topics.
    """
    return parse_words(files("foretrace.engines").joinpath("topics.txt").read_text("utf-8"))


def instruction_words(
    description: str, against: str | None, topics: Sequence[str] | None = None
) -> list[str]:
    """Return the words of instructions. They must not decide: texts repeat what they are told.

    Without `against`, the words of the description are not among them: they name a subject.

    Args:
        description: What texts should be.
        against: What the other texts should be, or None.
        topics: The topics. Default: everyday things, as for `write_contrast`.

    Returns:
        The words, in lower case.

    Example:
        >>> from foretrace.engines.contrast import instruction_words
        >>> instruction_words("Complain about {topic}!", "Praise {topic}!", ["a dog"])
        ['a', 'about', 'complain', 'dog', 'praise']
    """
    templates = [*_templates(against and description), *_templates(against)]
    instructions = [template.replace(TOPIC, " ") for template in templates]
    return sorted(set(words("\n".join([*instructions, *(topics or default_topics())]))))


def summary(removed: Counter[str]) -> str:
    """Return the reasons of removals and their numbers, the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in removed.most_common()) or "none"


def _templates(wish: str | None) -> list[str]:
    """Return the wordings of an instruction, in which only the topic is open."""
    if wish is None:
        return [neutral for _, neutral in WORDINGS]
    if TOPIC in wish:
        return [wish]
    return [wording.replace(WISH, wish.strip().rstrip(".")) for wording, _ in WORDINGS]


def _tasks(wish: str, against: str | None, topics: Sequence[str], num_texts: int) -> list[_Task]:
    """Return what to write: the sides in turn, COPIES texts of each instruction."""
    sides = {FOR: _templates(wish), AGAINST: _templates(against)}
    tasks = []
    for number in range(max(1, -(-num_texts // (2 * COPIES)))):
        lap, index = divmod(number, len(topics))  # each lap takes every topic in another wording
        first, second = (forms[(index + lap) % len(forms)] for forms in sides.values())
        tasks += [_Task(FOR, topics[index], first, second, wish)] * COPIES
        tasks += [_Task(AGAINST, topics[index], second, first, against)] * COPIES
    return tasks


def _select(tasks: Sequence[_Task], written: Sequence[Written]) -> Contrast:
    """Clean texts, and remove useless ones."""
    contrast = Contrast([], Counter())
    selections: dict[_Task, Selection] = {}
    for task, (answer, finished) in zip(tasks, written, strict=True):
        told = task.template.replace(TOPIC, "\n")
        selection = selections.setdefault(task, Selection(told, task.wish or ""))
        text = clean(answer, finished=finished)
        if fault := selection.fault(text):
            contrast.removed[fault] += 1
        else:
            score = float(task.side == FOR)
            contrast.texts.append(ContrastText(text, task.side, task.topic, score))
    return contrast
