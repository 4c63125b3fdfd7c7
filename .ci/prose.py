"""Check the prose of Markdown pages and docstrings: short sentences, active voice, plain words.

    python .ci/prose.py [--counts] [FILE ...]

Without files, it checks the README, the pages of the documentation and all docstrings. It prints
`FILE:LINE: RULE: TEXT` for each finding, or with --counts the number of findings of each file and
rule. It exits with 1 if there is a finding.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = ["*.md", "docs/**/*.md", "examples/**/*.md", "src/**/*.py"]
TEXTS_OF_LMS = ROOT / "docs/results/steering.md"  # not prose of this project
MAX_WORDS = 35
MAX_CLAUSES = 3  # more parts between semicolons are the items of a list

PARTICIPLE = (
    r"(?:\w+ed|begun|bound|brought|built|chosen|cut|done|drawn|found|given|held|hidden|kept|known|"
    r"left|lost|made|meant|met|paid|put|read|run|seen|sent|set|shown|split|spent|taken|told|"
    r"written)"
)
PASSIVE = re.compile(rf"\b(?:is|are|was|were|be|been|being)\s+(?:\w+ly\s+|not\s+)?{PARTICIPLE}\b")
WORDS = {
    "archaic": (
        r"hence|thus|thereof|therein|thereby|whereby|wherein|herein|hitherto|whilst|amongst|albeit|"
        r"lest|beside|nought|reckon\w*|shall|asunder|forthwith|aforementioned|whence|upon"
    ),
    "filler": (
        r"very|quite|rather|simply|obviously|of course|in order to|basically|actually|it should be "
        r"noted|note that|needless to say|in fact|the fact that"
    ),
    "which": r"(?<=, )which (?:is|are|was|were|has|have)",
}
PATTERNS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in WORDS.items()}

FENCE = re.compile(r"^ *(```|~~~)")
TABLE, HEADING = re.compile(r"^\s*\|"), re.compile(r"^\s*#")
# A new item, field or section of a docstring begins a new block.
NEW_BLOCK = re.compile(r"^\s*(?:[-*] |\d+\. |>|\w+: |(?:Args|Returns|Raises|Yields|Example)s?:)")
SENTENCE_END = re.compile(r"(?<=[.!?:;])[)\"*]*\s+(?=[\"(*]*(?:[A-Z0-9]|vLLM|foretrace))")


class Block(NamedTuple):
    """A paragraph, list item or table cell."""

    line: int
    text: str


def blocks(text: str, first: int = 1, *, indented_code: bool = False) -> Iterator[Block]:
    """Yield the prose of a page or docstring, without code and headings."""
    lines: list[str] = []
    start, fenced = first, False
    for number, line in enumerate([*text.splitlines(), ""], first):
        is_code = fenced or FENCE.match(line) or (indented_code and re.match(r" {8}|.*>>>", line))
        fenced ^= bool(FENCE.match(line))
        ends = not line.strip() or is_code or TABLE.match(line) or HEADING.match(line)
        if lines and (ends or NEW_BLOCK.match(line)):
            yield Block(start, " ".join(lines))
            lines = []
        if TABLE.match(line) and not is_code:
            yield from (Block(number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line))
        elif not ends:
            start = start if lines else number
            lines.append(line.strip())


def docstrings(source: str) -> Iterator[Block]:
    """Yield the prose of all docstrings of a module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield from blocks(text, node.body[0].lineno, indented_code=True)


def plain(text: str) -> str:
    """Replace code, links and marks by words."""
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|https?://\S+", "", text)


def findings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the rule and the excerpt of each finding in a block."""
    for sentence in SENTENCE_END.split(plain(text)):
        items = sentence.split("; ")
        words = max(items, key=len).split() if len(items) > MAX_CLAUSES else sentence.split()
        if len(words) > MAX_WORDS:
            yield "long", f"{len(words)} words: {' '.join(words[:12])} ..."
        if len(passives := PASSIVE.findall(sentence)) > 1:
            yield "passives", "; ".join(passives)
        for rule, pattern in PATTERNS.items():
            for match in pattern.finditer(sentence):
                yield rule, sentence[max(0, match.start() - 25) : match.end() + 25]


def main() -> None:
    """Check the files of the command line, or all."""
    arguments = sys.argv[1:]
    named = [Path(name).resolve() for name in arguments if not name.startswith("--")]
    every = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    files = named or sorted(every - {TEXTS_OF_LMS})
    counts: Counter[tuple[str, str]] = Counter()
    for path in files:
        text = path.read_text("utf-8")
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for block in docstrings(text) if path.suffix == ".py" else blocks(text):
            for rule, excerpt in findings(block.text):
                counts[name, rule] += 1
                if "--counts" not in arguments:
                    print(f"{name}:{block.line}: {rule}: {excerpt}")
    if "--counts" in arguments:
        for (name, rule), count in sorted(counts.items()):
            print(f"{count:4} {rule:9} {name}")
    sys.exit(1 if counts else 0)


if __name__ == "__main__":
    main()
