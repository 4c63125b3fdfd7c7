"""The language model, its HMM, data, and what was made of them before."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from candidates import head as heads
from candidates.evidence import heed
from candidates.reference import Beliefs, Dense
from candidates.windows import read_windows
from candidates.writing import Look
from foretrace import _tabular
from foretrace.attribute import tokenize
from foretrace.evaluate.generations import encode_with_bos
from foretrace.hmm import HMM

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2-135m"


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    rollouts: int = 48
    prefixes: int = 60
    texts: int = 20_000
    paths: int = 4_000
    windows: int = 16_000
    prompts: int = 40
    continuations: int = 8
    points: int = 2
    tasks: int = 2
    step: int = 1
    """Of the candidates, every so many."""


QUICK = Size(4, 1, 300, 64, 64, 2, 2, points=1, tasks=1, step=8)


class Workbench:
    """The language model, its HMM, data, and what was made of them before."""

    def __init__(self, source: Path, size: Size, kept: Path, judges: Path | None) -> None:
        self.size, self.kept, self.judges = size, kept, judges
        self.data = Path(os.environ["FORETRACE_DATA"])
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.lm = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.hmm = HMM.from_pretrained(EXAMPLE).to(dtype=torch.float32)
        self.dense = Dense.of(self.hmm)
        self.begin = self.hmm.config.eos_token_ids[0]
        self.ends = self.hmm.config.eos_token_ids
        self.hidden = torch.zeros(0)  # of the LM's last step
        self.lm.get_submodule("model.norm").register_forward_hook(self._remember)
        kept.mkdir(parents=True, exist_ok=True)

    def _remember(self, *given: Any) -> None:
        self.hidden = given[-1][:, -1].float()

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Take what was made before, or make it."""
        file = self.kept / f"{name}.pt"
        if not file.exists():
            made = make()
            torch.save(made, file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
        return torch.load(file, weights_only=True)

    def rows(self, file: str, count: int) -> list[dict[str, Any]]:
        """Read the first rows of a table."""
        return _tabular.read_rows(self.data / file, [])[:count]

    def tokens(self, rows: Sequence[dict[str, Any]], column: str) -> list[list[int]]:
        """Tokenize texts as continuations, as attributes are fitted to them."""
        texts = [str(row[column]) for row in rows]
        whole = tokenize(texts, self.tokenizer, window=1_000_000)
        return [list(map(int, ids)) for ids in whole.token_ids]

    def prompts(self, file: str, count: int) -> tuple[list[str], list[list[int]]]:
        """Read prompts, as texts and as the LM is given them."""
        texts = [str(row["prompt"]) for row in self.rows(file, count)]
        return texts, encode_with_bos(self.tokenizer, texts, self.begin)

    def look(self, name: str) -> Look:
        """Find how what is believed of states is reconsidered."""
        if name == "filter":
            return lambda beliefs, _: beliefs
        if name in ("head", "joint"):
            head, _ = self.head(name)

            def believe(beliefs: Beliefs, logits: Tensor) -> Beliefs:
                found = head(self.hidden)
                plain = found.repeat_interleave(len(logits) // len(found), 0)
                return replace(beliefs, plain=plain, weighted=plain)

            return believe
        damping, steps = {"half": (0.5, 1), "two": (1.0, 2)}[name]
        return lambda beliefs, logits: heed(self.dense, beliefs, logits.softmax(-1), damping, steps)

    def tables(self, look: str) -> Dense:
        """Find the HMM's tables: its own, but where a head was trained jointly with others."""
        return self.head(look)[1] if look == "joint" else self.dense

    @cache  # noqa: B019  there is one workbench
    def head(self, name: str) -> tuple[heads.Head, Dense]:
        """Train a head on windows of what the LM wrote, alone or jointly with the tables."""
        jointly = name == "joint"

        def read() -> tuple[Tensor, Tensor]:
            file = self.data / "lm" / "smollm2_samples.npz"
            return read_windows(self.lm, file, self.size.windows, self.begin)

        def make() -> dict[str, Any]:
            given, rounds = self.keep("windows", read), 2 if jointly else 0
            found, dense = heads.train(self.dense, *given, rounds=rounds, epochs=5)
            return {"head": vars(found), "tables": vars(dense) if jointly else {}}

        kept = self.keep(name, make)
        return heads.Head(**kept["head"]), Dense(**kept["tables"]) if jointly else self.dense
