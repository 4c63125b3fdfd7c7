"""The texts of all methods of a suite, with their scores and all that the page says of them.

One compressed file holds them, so that the page can be written, and the texts judged, again. It has
no prompts, which are data of others: it names them by index, and has a checksum of their file.
"""

import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from foretrace import _io
from foretrace.errors import InvalidFileError, reason
from foretrace.evaluate.metrics import Scores
from peers.parts import checksum

ENDING = ".jsonl.xz"
DIGITS = 3  # after the decimal point, of nats, prices and scores


@dataclass
class KeptMethod:
    """The texts of a method: a list for each prompt, with a value for each continuation."""

    curve: str | None
    best_of: int
    has_price: bool
    texts: list[list[str]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    nats: list[list[float]] = field(default_factory=list)
    """Negative log-probabilities under the distributions that texts were sampled from."""
    losses: list[list[float | None]] = field(default_factory=list)
    """The unsteered LM's mean loss on each text, in nats per token."""
    prices: list[list[float]] = field(default_factory=list)
    scores: list[dict[str, list[float | None]]] = field(default_factory=list)
    """By judge."""

    def scores_by(self, judge: str) -> list[list[float | None]]:
        """Return the scores of a judge."""
        return [row[judge] for row in self.scores]


COLUMNS = ("texts", "tokens", "nats", "losses", "prices", "scores")
RESULTS = ("lm", "hmm", "baseline", "sampling")


@dataclass(frozen=True)
class KeptTexts:
    """The texts of a suite, and what they were made with."""

    suite: str
    header: Mapping[str, Any]
    """`lm`, `hmm`, `baseline` and `sampling` of the run; `prompts`: the file, its checksum, and how
    many; `results`: the figures and the cost of every method. `record` adds more."""
    methods: Mapping[str, KeptMethod]

    @classmethod
    def collect(cls, suite: str, results: Mapping[str, Any], folder: Path, prompts: Path) -> Self:
        """Collect the texts of a finished run of `foretrace evaluate`.

        Args:
            suite: The name of the suite.
            results: The results of the run.
            folder: The folder of its outputs.
            prompts: The file of its prompts.
        """
        source = {"file": prompts.name, "sha256": checksum(prompts), "count": results["prompts"]}
        header: dict[str, Any] = {key: results[key] for key in RESULTS}
        header["results"] = {
            name: {"figures": facts["figures"], "cost": facts["cost"]}
            for name, facts in results["methods"].items()
        }
        methods = {
            name: _collect_method(name, facts, folder) for name, facts in results["methods"].items()
        }
        return cls(suite, {**header, "prompts": source}, methods)

    def judged(self, scores: Mapping[str, Mapping[str, Scores]]) -> Self:
        """Return a copy with more scores, by judge and method."""
        methods = {
            name: replace(
                method,
                scores=[
                    known | {judge: _rounded(rows[name][index]) for judge, rows in scores.items()}
                    for index, known in enumerate(method.scores or [{}] * len(method.texts))
                ],
            )
            for name, method in self.methods.items()
        }
        return replace(self, methods=methods)

    def record(self, **facts: Any) -> Self:
        """Return a copy with facts added to the header."""
        return replace(self, header={**self.header, **facts})

    @property
    def max_new_tokens(self) -> int:
        """The maximal number of generated tokens."""
        return int(self.header["sampling"]["max_new_tokens"])

    @property
    def num_texts(self) -> int:
        """The number of texts of all methods."""
        return sum(len(row) for method in self.methods.values() for row in method.texts)

    def write(self, folder: Path) -> Path:
        """Write the file into a folder; return its path. Equal texts give equal bytes."""
        methods = {
            name: {"curve": one.curve, "best_of": one.best_of, "has_price": one.has_price}
            for name, one in self.methods.items()
        }
        lines = [{"suite": self.suite, **self.header, "methods": methods}]
        lines += [
            {"method": name, **{column: getattr(one, column)[index] for column in COLUMNS}}
            for name, one in self.methods.items()
            for index in range(len(one.texts))
        ]
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        path = folder / f"{self.suite}{ENDING}"
        with _io.atomic_write(path) as scratch:
            scratch.write_bytes(lzma.compress(content.encode("utf-8", "surrogatepass"), preset=9))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` wrote."""
        try:
            content = lzma.decompress(path.read_bytes()).decode("utf-8", "surrogatepass")
            header, *rows = map(json.loads, content.rstrip("\n").split("\n"))
            suite = header.pop("suite")
            methods = {name: KeptMethod(**one) for name, one in header.pop("methods").items()}
            for row in rows:
                for column in COLUMNS:
                    getattr(methods[row["method"]], column).append(row[column])
        except (OSError, EOFError, ValueError, KeyError, TypeError, lzma.LZMAError) as error:
            raise InvalidFileError(
                f"{path} is not a file of kept texts ({reason(error)}). Pass one that "
                "benchmarks/peers/run.py wrote."
            ) from error
        return cls(suite, header, methods)


def _collect_method(name: str, facts: Mapping[str, Any], folder: Path) -> KeptMethod:
    """Collect the texts of a method, and the LM's losses on them."""
    file = name.replace("/", "-")
    _, *rows = _io.read_lines(folder / "generations" / f"{file}.jsonl")
    rows.sort(key=lambda row: int(row["prompt"]))
    losses = _io.read_json(folder / "surprise" / f"{file}.json")["nats"]
    plan, has_price = facts["plan"], "price" in facts["figures"]
    return KeptMethod(
        plan["curve"],
        plan["best_of"],
        has_price,
        [row["texts"] for row in rows],
        [row["tokens"] for row in rows],
        [_rounded(row["nats"]) for row in rows],
        [_rounded(row) for row in losses],
        [_rounded(row["prices"]) if has_price else [] for row in rows],
    )


def _rounded(values: Sequence[Any]) -> list[Any]:
    return [None if value is None else round(value, DIGITS) for value in values]
