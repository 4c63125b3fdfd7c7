"""Continuations of many prompts: drawn batch by batch, kept in a file, never drawn twice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from foretrace import _io
from foretrace.attribute import Attribute
from foretrace.engines.transformers import (
    decode_after,
    encode_prompts,
)
from foretrace.engines.transformers.sampler import Drawn, Sampler
from foretrace.errors import InvalidFileError
from foretrace.steering import Goal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Observe = Callable[[int, int], None]
TIMED, TURNS = 2, 3  # prompts, and times, when methods are timed


@dataclass(frozen=True)
class Sampling:
    """How continuations are drawn: the field's convention, unless told otherwise."""

    continuations: int = 25
    max_new_tokens: int = 20
    top_p: float = 0.9
    seed: int = 0
    rows: int = 250
    """Continuations at once."""


@dataclass(frozen=True)
class Method:
    """A way to write: toward goals, after an instruction, or by choosing among several."""

    name: str
    goals: Sequence[Sequence[Goal]] | None = None
    """Those of every prompt."""
    prompts: Sequence[str] | None = None
    """What the LM is given instead of the prompts themselves: instructions."""
    best_of: int = 1
    """How many are drawn for each one that is kept ..."""
    best_by: Sequence[Attribute] = ()
    """... by the probability of each prompt's attribute."""


class Generation(NamedTuple):
    """What was written after a prompt."""

    texts: list[str]
    nats: list[float]
    """How surprising each was to its writer: the mean is the conditional entropy."""
    seconds: float


@dataclass(frozen=True)
class Writer:
    """A language model that continues prompts."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    sampling: Sampling
    ends: Sequence[int]
    """Tokens that end a text."""
    begin: int | None = None
    """What texts begin with: put before every prompt, as before what the HMM learned from."""

    def write(
        self,
        prompts: Sequence[str],
        method: Method,
        file: Path,
        settings: Mapping[str, Any],
        observe: Observe = lambda done, total: None,
    ) -> list[Generation]:
        """Continue all prompts; what the file holds already is not drawn again.

        A batch depends on the seed and its place alone, so an interrupted run ends as if it had
        not been. `settings` say what else decides the texts: a file of others is refused.
        """
        known = _read(file, {**settings, "sampling": asdict(self.sampling), "method": method.name})
        given = method.prompts or prompts
        width = max(1, self.sampling.rows // (self.sampling.continuations * method.best_of))
        for start in range(0, len(prompts), width):
            batch = range(start, min(start + width, len(prompts)))
            if any(place not in known for place in batch):
                written = self._batch([given[place] for place in batch], method, batch)
                known |= dict(zip(batch, written, strict=True))
                _io.append_lines(
                    file, [{"prompt": place, **known[place]._asdict()} for place in batch]
                )
            observe(batch[-1] + 1, len(prompts))
        return [known[place] for place in range(len(prompts))]

    def cost(self, prompts: Sequence[str], method: Method, baseline: Method) -> float:
        """Give how long a method takes, against another: by turns, since the machine is shared."""
        places, ratios = range(min(TIMED, len(prompts))), []
        for turn in range(TURNS + 1):
            own, other = (self._timed(prompts, each, places) for each in (method, baseline))
            if turn:  # the first warms up
                ratios.append(own / other)
        return float(np.median(ratios))

    def _timed(self, prompts: Sequence[str], method: Method, places: range) -> float:
        given = [(method.prompts or prompts)[place] for place in places]
        return self._batch(given, method, places)[0].seconds

    def _batch(self, prompts: list[str], method: Method, places: range) -> list[Generation]:
        torch.manual_seed(_stream(self.sampling.seed, places[0]))
        encoded = encode_from(self.tokenizer, prompts, self.begin)
        sampling = self.sampling
        sampler = Sampler(self.lm, self.ends, sampling.max_new_tokens, sampling.top_p)
        goals = [] if method.goals is None else [method.goals[place] for place in places]
        began = perf_counter()
        drawn = sampler.draw(encoded, self.sampling.continuations * method.best_of, goals)
        seconds = (perf_counter() - began) / len(prompts)
        found = []
        for place, ids, own in zip(places, encoded, drawn, strict=True):
            if method.best_of > 1:
                own = self._best(own, method.best_of, method.best_by[place])
            texts = [decode_after(self.tokenizer, ids, each.tokens) for each in own]
            found.append(Generation(texts, [-each.log_probability for each in own], seconds))
        return found

    def _best(self, candidates: Sequence[Drawn], of: int, attribute: Attribute) -> list[Drawn]:
        """Choose from every few candidates the one that has the attribute most probably.

        One that says nothing is chosen last: it cannot lack the attribute.
        """
        texts = [[token for token in each.tokens if token not in self.ends] for each in candidates]
        said = torch.tensor([bool(str(self.tokenizer.decode(text)).strip()) for text in texts])
        likely = (attribute.probability(texts) + said.double()).view(-1, of)
        best = likely.argmax(1).tolist()
        return [candidates[row * of + column] for row, column in enumerate(best)]


def encode_from(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], begin: int | None
) -> list[list[int]]:
    """Turn prompts into token ids, after the token that texts begin with if it is known."""
    if begin is None:
        return encode_prompts(tokenizer, prompts)
    encoded = tokenizer(list(prompts), add_special_tokens=False).input_ids
    return [[begin, *ids] for ids in encoded]


def _stream(seed: int, place: int) -> int:
    """Give every batch of every seed its own random numbers."""
    return int(np.random.SeedSequence([seed, place]).generate_state(1)[0])


def _read(file: Path, settings: Mapping[str, Any]) -> dict[int, Generation]:
    """Read what is there; begin a file that is not."""
    rows = _io.read_lines(file)
    if not rows:
        _io.write_lines(file, [{"settings": dict(settings)}])
        return {}
    if rows[0].get("settings") != settings:
        raise InvalidFileError(
            f"{file} holds texts that were drawn with other settings. Choose another folder, or "
            f"remove it to draw anew."
        )
    return {
        row["prompt"]: Generation(row["texts"], row["nats"], row["seconds"]) for row in rows[1:]
    }
