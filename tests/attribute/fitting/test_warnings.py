"""Test the warnings of a fit: tables of texts that cause each of them, and tables that do not."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from foretrace.attribute import Attribute

WORDS = [f"word{number}" for number in range(3000)]
FREQUENT = "the of and to a in that it was for on with".split()  # noqa: SIM905
GOOD, BAD = ([f"{side}{number}" for number in range(60)] for side in ("good", "bad"))


class Words:
    """A tokenizer of words, of which all but the first begin with a space."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        return [self.ids.setdefault(f" {word}", len(self.ids)) for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        words = list(self.ids)
        return "".join(words[token] for token in token_ids)

    def get_vocab(self) -> dict[str, int]:
        return self.ids


@dataclass
class Table:
    """Texts with their scores; half of them have the attribute."""

    texts: list[str]
    scores: list[float]
    validation: "Table | None" = None
    prompts: list[str] | None = None
    random: Random = field(default_factory=lambda: Random(1))

    def change(self, change: Callable[[str], str], score: float, share: float = 1.0) -> "Table":
        """Change a share of the texts with a score."""
        for index, text in enumerate(self.texts):
            if self.scores[index] == score and self.random.random() < share:
                self.texts[index] = change(text)
        return self


def table(count: int = 600, positive: int | None = None, seed: int = 0) -> Table:
    """Return texts of frequent and rare words, and some that tell the sides apart in most texts."""
    rng = Random(seed)
    texts, scores = [], []
    weights = [1 / (rank + 20) for rank in range(len(WORDS))]
    for index in range(count):
        score = float(index < (count // 2 if positive is None else positive))
        words = rng.choices(WORDS, weights, k=rng.randint(8, 25)) + rng.choices(FREQUENT, k=8)
        words += rng.choices(GOOD if score == (rng.random() < 0.9) else BAD, k=3)
        rng.shuffle(words)
        texts.append(" ".join(words))
        scores.append(score)
    return Table(texts, scores)


def copied(share: float) -> Table:
    """Return texts of which some are copies of others, with another last word."""
    made = table()
    for index in range(int(share * len(made.texts))):
        made.texts[2 * index] = made.texts[2 * index + 1].rsplit(" ", 1)[0] + " changed"
        made.scores[2 * index] = made.scores[2 * index + 1]
    return made


def templates() -> Table:
    """Return texts of four phrases each, such as an opening, two sentences and a closing."""
    rng = Random(0)
    texts = []
    for side in ("formal", "casual"):
        phrases = [
            [" ".join(f"{side}{part}{n}x{i}" for i in range(6)) for n in range(5)]
            for part in range(4)
        ]
        texts += [" ".join(rng.choice(part) for part in phrases) for _ in range(300)]
    return Table(texts, [1.0] * 300 + [0.0] * 300)


def overlapping(count: int) -> Table:
    made, others = table(), table(seed=2, count=100)
    others.texts[:count] = made.texts[:count]
    made.validation = others
    return made


def with_prompts(prompts: list[str]) -> Table:
    made = table()
    made.prompts = prompts
    return made


def warnings(made: Table) -> list[str]:
    words = Words()
    token_ids = [words(text) for text in made.texts]
    validation = None
    if made.validation is not None:
        validation = [words(text) for text in made.validation.texts], made.validation.scores
    prompts = None if made.prompts is None else [words(prompt) for prompt in made.prompts]
    fitted = Attribute.fit(
        token_ids,
        made.scores,
        vocab_size=len(words.ids) + 10,
        validation=validation,
        tokenizer=words,
        prompts=prompts,
    )
    found: list[str] = fitted.config.fit["warnings"]
    return found


def shorter(text: str) -> str:
    return " ".join(text.split()[:12])


def capitalised(text: str) -> str:
    return text.replace("word", "Word")


CAUSES: list[tuple[Callable[[], Table], str]] = [
    (lambda: table(120), "There are 120 texts, fewer than 200"),
    (lambda: table(600, positive=40), "Only 36 fitted texts are on the rarer side"),
    (lambda: copied(0.3), "texts are near duplicates of others; they were held out together"),
    (lambda: overlapping(10), "10 of 100 held-out texts are near duplicates of fitted texts:"),
    (lambda: table().change(shorter, 1.0), "Length alone ranks the texts with an AUC of"),
    (lambda: table().change("{} !".format, 1.0, 0.8), "Punctuation alone ranks"),
    (lambda: table().change(capitalised, 0.0), "The share of capitalised words alone"),
    (lambda: table().change("{} 7 1 3 4".format, 1.0), "The share of numbers alone"),
    (
        lambda: table().change("it am {} an shall such".format, 1.0, 0.7),
        "4 of the 50 strongest tokens are function words or punctuation: ",
    ),
    (
        lambda: table().change("{} women".format, 0.0, 0.5),
        "Terms for groups of people are among the 50 strongest tokens: women.",
    ),
    (
        lambda: with_prompts(["unknown words alone"]),
        "100% of the tokens of the prompts occur in no",
    ),
]

NO_CAUSES: list[Callable[[], Table]] = [
    lambda: table(),
    lambda: table(260),
    lambda: table(600, positive=80),
    lambda: copied(0.03),
    lambda: overlapping(3),
    lambda: table().change(shorter, 1.0, 0.2),
    lambda: table().change("{} .".format, 1.0).change("{} .".format, 0.0),
    lambda: table().change(capitalised, 0.0).change(capitalised, 1.0),
    lambda: with_prompts(["the word1 of word2", "it was word3"]),
]


@pytest.mark.parametrize(("made", "expected"), CAUSES)
def test_texts_cause_one_warning(made: Callable[[], Table], expected: str) -> None:
    found = warnings(made())
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize("made", NO_CAUSES)
def test_texts_cause_no_warning(made: Callable[[], Table]) -> None:
    assert warnings(made()) == []


def test_templates_cause_warnings_about_the_measured_auc() -> None:
    found = "\n".join(warnings(templates()))
    assert "599 of 600 texts are near duplicates of others, too many to hold them out" in found
    assert "The AUC of 1.0000 says little about other texts" in found


def test_warnings_need_no_tokenizer() -> None:
    words, made = Words(), table(120)
    token_ids = [words(text) for text in made.texts]
    labels = [f"{score}" for score in made.scores]
    fitted = Attribute.fit_each(token_ids, labels, vocab_size=len(words.ids))
    for attribute in fitted:
        assert attribute.config.fit["warnings"][0].startswith("There are 120 texts")
