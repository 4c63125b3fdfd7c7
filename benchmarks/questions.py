"""Multiple-choice questions that a small language model can answer: facts and arithmetic."""

import operator
import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).with_name("questions.toml")
OPTIONS = 4
ARITHMETIC = 150
EXAMPLES = {
    "+": "2 + 3 = 5\n8 + 6 = 14\n",
    "-": "9 - 4 = 5\n17 - 3 = 14\n",
    "*": "2 * 4 = 8\n5 * 3 = 15\n",
}
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass(frozen=True)
class Question:
    """A beginning of a text, and four ways to go on, of which the first is right."""

    kind: str
    prompt: str
    options: tuple[str, ...]


def questions(seed: int = 0) -> list[Question]:
    """Return all questions: those of the tables, then arithmetic. The seed chooses the options."""
    generator = random.Random(seed)
    return [*_facts(generator), *_arithmetic(generator)]


def _facts(generator: random.Random) -> Iterator[Question]:
    """Yield a question for every row of the tables."""
    for kind, table in tomllib.loads(TABLES.read_text("utf-8")).items():
        answers = sorted({row[1] for row in table["rows"]})
        for subject, right, *wrong in table["rows"]:
            others = [answer for answer in answers if answer != right]
            chosen = wrong or generator.sample(others, OPTIONS - 1)
            options = tuple(f" {option}" for option in (right, *chosen))
            yield Question(kind, table["question"].format(subject), options)


def _arithmetic(generator: random.Random) -> Iterator[Question]:
    """Yield sums, differences and products in turns, none of them twice nor among the examples."""
    seen = {line for lines in EXAMPLES.values() for line in lines.splitlines()}
    while len(seen) < ARITHMETIC + 2 * len(EXAMPLES):
        sign = list(EXAMPLES)[len(seen) % len(EXAMPLES)]
        left, right = _operands(sign, generator)
        result = OPERATORS[sign](left, right)
        problem = f"{left} {sign} {right} ="
        if f"{problem} {result}" in seen:
            continue
        seen.add(f"{problem} {result}")
        options = (result, *generator.sample(_near(result), OPTIONS - 1))
        yield Question("arithmetic", EXAMPLES[sign] + problem, tuple(f" {n}" for n in options))


def _operands(sign: str, generator: random.Random) -> tuple[int, int]:
    if sign == "*":
        return generator.randint(2, 9), generator.randint(2, 9)
    left, right = generator.randint(2, 20), generator.randint(1, 9)
    return (left + right, right) if sign == "-" else (left, right)


def _near(result: int) -> list[int]:
    """Return wrong results with the same number of digits: a shorter one is more probable."""
    near = [result + step for step in (-10, -4, -3, -2, -1, 1, 2, 3, 4, 10)]
    return [number for number in near if number > 0 and len(str(number)) == len(str(result))]
