"""Clean the texts that a language model writes on request, and find useless ones."""

import re
from collections.abc import Sequence

REFUSAL = re.compile(
    r"\bas an ai\b|\bai (?:assistant|language model)\b|\blarge language model\b"
    r"|\bi(?:'m| am) (?:sorry|unable)\b.{0,20}\b(?:can't|cannot|unable|not able)\b"
    r"|\bi (?:can't|cannot|can not|won't) (?:write|help|assist|provide|fulfil|create|generate)\b",
    re.IGNORECASE,
)
INTRODUCTION = re.compile(
    r"(?:(?:sure|certainly|of course|in (?:one|two)(?: or two)? sentences?)\b[^:]{0,100}"
    r"|here(?:'s|\u2019s| is| are)\b[^:]{0,100}"
    r"|(?:sentence|text|answer|response|output)s?(?: \d+)?)\s*:\s*",
    re.IGNORECASE,
)
LIST_MARK = re.compile(r"(?:\d+[.)]|[-*\u2022])\s+|\d+\u3001")
PLACEHOLDER = re.compile(r"\[[^\]]+\]|<[^>]+>")
SENTENCE_END = re.compile(r"[.!?\u2026][\"')\]*\u2019\u201d]*(?=\s|$)|[\u3002\uff01\uff1f]")
MARKS = '"\u201c\u201d\u201e\u00ab\u00bb\u300c\u300d*_`'  # quotation marks, Markdown
# Thai, Japanese and Chinese have no spaces between words: each character counts as a word.
UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
LETTER = rf"[^\W{UNSPACED}]"
WORD = re.compile(rf"[{UNSPACED}]|{LETTER}+(?:'{LETTER}+)*")
SPACED = re.compile(rf"\s*(?:[{UNSPACED}]|[^\s{UNSPACED}]+)")
ECHO = 4  # words of the instruction in a row
SHORTEST = 3  # words
DUPLICATE = 0.6  # of the triples of words of the shorter text

Runs = set[tuple[str, ...]]


def clean(text: str, *, finished: bool) -> str:
    """Remove what is not part of a text: introductions, labels, quotation marks, half sentences.

    Args:
        text: What a language model has answered.
        finished: Whether the answer ends by itself. Else it is cut after its last sentence.

    Returns:
        The text in one line; empty if no sentence is complete.

    Example:
        >>> from foretrace.engines.cleaning import clean
        >>> clean('Sentence: "It rains. We wa', finished=False)
        'It rains.'
    """
    lines = [LIST_MARK.sub("", line.strip(), count=1) for line in text.splitlines()]
    while lines and (not lines[0] or lines[0].endswith((":", "\uff1a"))):
        lines.pop(0)
    line = " ".join(" ".join(lines).split())
    if introduction := INTRODUCTION.match(line):
        line = line[introduction.end() :]
    if not finished:
        ends = [match.end() for match in SENTENCE_END.finditer(line)]
        line = line[: ends[-1]] if ends else ""
    inner = line.strip(MARKS)
    return (line if set(MARKS) & set(inner) else inner).strip()


class Selection:
    """Finds texts of no use: empty ones, refusals, echoes of the instruction, near duplicates.

    Args:
        instruction: The instruction of the texts. Where a topic was named, it has a line break.
        wish: What the texts should be like. A text with all these words in a row is an echo.
    """

    def __init__(self, instruction: str, wish: str = "") -> None:
        self._echoes = [
            (length, runs(part, length))
            for part in instruction.splitlines()
            for length in [ECHO * characters(part)]
        ]
        if (length := len(words(wish))) > characters(wish):
            self._echoes.append((length, runs(wish, length)))
        self._kept: list[Runs] = []

    def fault(self, text: str) -> str | None:
        """Return why a text is of no use; None if it is kept.

        Args:
            text: A text that `clean` returned.

        Returns:
            A reason, or None.
        """
        if len(words(text)) < SHORTEST:
            return "empty or cut off"
        if REFUSAL.search(text.replace("\u2019", "'")):
            return "refusals"
        if any(told & runs(text, length) for length, told in self._echoes):
            return "echoes of the instruction"
        if PLACEHOLDER.search(text):
            return "placeholders"
        triples = runs(text, 3)
        if any(_overlap(triples, other) > DUPLICATE for other in self._kept):
            return "near duplicates"
        self._kept.append(triples)
        return None


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case.

    Args:
        text: A text.

    Returns:
        The words.

    Example:
        >>> from foretrace.engines.cleaning import words
        >>> words("It's late.")
        ["it's", 'late']
    """
    return WORD.findall(text.replace("\u2019", "'").casefold())


def split_words(text: str) -> list[str]:
    """Split a text at spaces, and around each character of a script without spaces.

    Args:
        text: A text.

    Returns:
        The words, with the punctuation next to them.

    Example:
        >>> from foretrace.engines.cleaning import split_words
        >>> split_words("It's late."), split_words("下雨了")
        (["It's", 'late.'], ['下', '雨', '了'])
    """
    return [word.strip() for word in SPACED.findall(text)]


def first_words(text: str, count: int) -> str:
    """Return the beginning of a text, up to so many words, with single spaces.

    Args:
        text: A text.
        count: The number of words.

    Returns:
        The beginning.

    Example:
        >>> from foretrace.engines.cleaning import first_words
        >>> first_words("It is  late.", 2), first_words("下雨了", 2)
        ('It is', '下雨')
    """
    return " ".join("".join(SPACED.findall(text)[:count]).split())


def characters(text: str) -> int:
    """Return the usual length of a word of a script without spaces; 1 for other scripts."""
    return 2 if re.search(f"[{UNSPACED}]", text) else 1


def runs(text: str, length: int) -> Runs:
    """Return all runs of so many words."""
    parts: Sequence[str] = words(text)
    return {tuple(parts[i : i + length]) for i in range(len(parts) - length + 1)}


def _overlap(first: Runs, second: Runs) -> float:
    """Return the share of the smaller set that the other set contains."""
    return len(first & second) / max(1, min(len(first), len(second)))
