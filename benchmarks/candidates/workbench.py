"""The language model, its HMM, data, and what was made of them before."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from candidates import head as heads
from candidates.evidence import heed
from candidates.reference import Beliefs, Dense
from candidates.writing import Look
from foretrace import _tables
from foretrace.attribute import tokenize
from foretrace.distill import Corpus
from foretrace.evaluate.generations import encode_from
from foretrace.hmm import HMM

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2-135m"


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    rollouts: int = 64
    prefixes: int = 60
    texts: int = 20_000
    paths: int = 4_000
    windows: int = 30_000
    prompts: int = 50
    continuations: int = 10
    points: int = 3
    tasks: int = 2
    step: int = 1
    """Of the candidates, every so many."""


QUICK = Size(4, 2, 600, 64, 64, 2, 2, points=1, tasks=1, step=3)


class Workbench:
    """The language model, its HMM, data, and what was made of them before."""

    def __init__(self, source: Path, size: Size, kept: Path, judges: Path | None) -> None:
        self.size, self.kept, self.judges = size, kept, judges
        self.data = Path(os.environ["FORETRACE_DATA"])
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.lm = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
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
        return _tables.read_rows(self.data / file, [])[:count]

    def tokens(self, rows: Sequence[dict[str, Any]], column: str) -> list[list[int]]:
        """Tokenize texts as continuations, as attributes are fitted to them."""
        texts = [str(row[column]) for row in rows]
        whole = tokenize(texts, self.tokenizer, window=1_000_000)
        return [list(map(int, ids)) for ids in whole.token_ids]

    def prompts(self, file: str, count: int) -> tuple[list[str], list[list[int]]]:
        """Read prompts, as texts and as the LM is given them."""
        texts = [str(row["prompt"]) for row in self.rows(file, count)]
        return texts, encode_from(self.tokenizer, texts, self.begin)

    def look(self, name: str) -> Look:
        """Find how what is believed of states is reconsidered."""
        if name == "filter":
            return lambda beliefs, _: beliefs
        if name == "head":
            head = self.head()

            def believe(beliefs: Beliefs, logits: Tensor) -> Beliefs:
                found = head(self.hidden)
                plain = found.repeat_interleave(len(logits) // len(found), 0)
                return replace(beliefs, plain=plain, weighted=plain)

            return believe
        damping, steps = {"half": (0.5, 1), "two": (1.0, 2)}[name]
        return lambda beliefs, logits: heed(self.dense, beliefs, logits.softmax(-1), damping, steps)

    def head(self) -> heads.Head:
        """Train a head on windows of the corpus that the HMM was distilled from."""

        def make() -> dict[str, Tensor]:
            tokens = _first(Corpus(os.environ["FORETRACE_CORPUS"]), self.size.windows)
            before, windows = tokens[:, :12], tokens[:, 12:28]
            hidden = []
            with torch.inference_mode():
                for part in torch.split(before, 250):
                    start = torch.full((len(part), 1), self.begin)
                    self.lm(torch.cat([start, part], 1), logits_to_keep=1)
                    hidden.append(self.hidden)
            return vars(heads.train(self.dense, torch.cat(hidden).clone(), windows, epochs=5))

        return heads.Head(**self.keep("head", make))


def _first(corpus: Corpus, count: int) -> Tensor:
    """Read rows that do not end early, as many as asked for."""
    found: list[Tensor] = []
    end = torch.tensor(corpus.manifest.eos_token_id)
    for batch in corpus.batches(corpus.split(0), 1024, seed=0, epoch=0):
        ended = torch.isin(batch[:, :28].long(), end).any(1)
        whole = batch[~ended]
        found.append(whole.long())
        if sum(map(len, found)) >= count:
            break
    return torch.cat(found)[:count]
