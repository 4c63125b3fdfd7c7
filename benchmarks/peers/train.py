"""Make what the methods need for an attribute, such as foretrace's attribute and the experts."""

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from foretrace.attribute import Attribute
from foretrace.cli.loading import load_lm
from foretrace.cli.terminal import ProgressBars
from foretrace.evaluate.preparation import fit_attributes
from foretrace.evaluate.suite import Suite
from foretrace.hmm import HMM
from peers import lm_steer, token_bias
from peers.control_vectors import NUM_PAIRS, VECTOR, train_vector
from peers.experts import ANTI_EXPERT, EXPERT
from peers.head_fit import fit_change
from peers.lm_steer import MAP, LowRankMap
from peers.lora import train_adapter
from peers.page import Made
from peers.parts import inputs_identity, is_made, part, read_record, write_record
from peers.sasa import SUBSPACE, fit_subspace
from peers.sides import MOST_TEXTS, read_sides
from peers.states import StateReader
from peers.token_bias import BIAS, TokenBias

ATTRIBUTE, LEVELS = "attribute.safetensors", "levels.safetensors"


@dataclass(frozen=True)
class Workshop:
    """The language model, the HMM and the data that attributes are made from."""

    lm: Path
    hmm: Path
    data: Path
    most_texts: int = MOST_TEXTS
    pairs: int = NUM_PAIRS

    def load_lm(self) -> tuple[Any, Any]:
        """Load a new copy of the language model, and its tokenizer."""
        return load_lm(str(self.lm), "auto", "auto")

    def make(self, suite: Suite, folder: Path, bars: ProgressBars) -> None:
        """Make all parts of a suite's attribute that are not there.

        Args:
            suite: The suite.
            folder: The folder where the run of the suite looks for fitted attributes.
            bars: Shows the progress.
        """
        name, plan = next(iter(suite.attributes.items()))
        sides = read_sides(plan, self.data, self.most_texts)
        lm, tokenizer = self.load_lm()
        self._fit(suite, folder, lm, tokenizer)
        self._find_levels(name)
        train_vector(lm, tokenizer, sides, part(name, VECTOR), self.pairs)
        bars.update(f"{name}: vector", 1, 1, "vectors")
        ends = HMM.from_pretrained(self.hmm).config.eos_token_ids
        bos = ends[0] if ends else None
        fit_heads(name, StateReader(lm, tokenizer, sides, bos), bars)
        for side, texts in zip((EXPERT, ANTI_EXPERT), sides, strict=True):
            lm, tokenizer = self.load_lm()  # training changes it
            observe = partial(_observe_steps, bars, f"{name}: {side}")
            train_adapter(lm, tokenizer, texts, part(name, side), bos, observe)

    def _fit(self, suite: Suite, folder: Path, lm: Any, tokenizer: Any) -> None:
        """Fit foretrace's attribute."""
        name = next(iter(suite.attributes))
        file = part(name, ATTRIBUTE)
        rows = suite.attributes[name].rows(self.data)
        inputs = inputs_identity([str(row) for row in rows], suite.attributes[name])
        if is_made(file, inputs):
            return
        start = perf_counter()
        hmm = HMM.from_pretrained(self.hmm)
        fitted = fit_attributes(suite, self.data, folder, lm, tokenizer, hmm)[name]
        seconds = perf_counter() - start
        fitted.save(file)
        write_record(file, inputs, seconds, len(rows))

    def _find_levels(self, name: str) -> None:
        """Find the strengths of the attribute's levels by the command that users run."""
        file = part(name, LEVELS)
        inputs = inputs_identity([read_record(part(name, ATTRIBUTE))["inputs"]], "levels")
        if is_made(file, inputs):
            return
        Attribute.load(part(name, ATTRIBUTE)).save(file)
        options = [self.lm, "--hmm", self.hmm, "--attribute", file]
        start = perf_counter()
        subprocess.run(
            [sys.executable, "-m", "foretrace", "calibrate", *map(str, options)], check=True
        )
        write_record(file, inputs, perf_counter() - start, 0)


def fit_heads(name: str, reader: StateReader, bars: ProgressBars) -> None:
    """Fit the methods that change the LM's head, on states that are read once."""
    vocabulary, size = reader.lm.get_output_embeddings().weight.shape
    for file, make, settings in (
        (MAP, partial(LowRankMap, size), lm_steer.SETTINGS),
        (BIAS, partial(TokenBias, vocabulary), token_bias.SETTINGS),
    ):
        observe = partial(_observe_steps, bars, f"{name}: {Path(file).stem}")
        fit_change(make, reader, part(name, file), settings, observe)
    fit_subspace(reader, part(name, SUBSPACE))
    bars.update(f"{name}: subspace", 1, 1, "subspaces")


def _observe_steps(bars: ProgressBars, stage: str, done: int, total: int) -> None:
    bars.update(stage, done, total, "steps")


def list_made(name: str) -> list[Made]:
    """List what it took to make an attribute by every method."""
    records = {
        key: read_record(part(name, key))
        for key in (ATTRIBUTE, LEVELS, VECTOR, MAP, BIAS, SUBSPACE, EXPERT, ANTI_EXPERT)
    }
    methods = {
        "foretrace: fit": [ATTRIBUTE],
        "foretrace: levels": [LEVELS],
        "control vector": [VECTOR],
        "LM-Steer": [MAP],
        "token bias": [BIAS],
        "SASA": [SUBSPACE],
        "fine-tuning": [EXPERT],
        "DExperts": [EXPERT, ANTI_EXPERT],
    }
    return [
        Made(
            method,
            name,
            sum(records[key]["seconds"] for key in keys),
            sum(records[key]["texts"] for key in keys),
        )
        for method, keys in methods.items()
    ]
