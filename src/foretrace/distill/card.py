"""The model card of a distilled HMM, and the curve of its training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrace import _io
from foretrace.hmm import HMM

CARD_FILE = "README.md"
CURVE_FILE = "likelihood.png"
USE = """```python
import foretrace as ft

hmm = ft.HMM.from_pretrained(FOLDER_OR_HUB_ID)
```
"""


def write(folder: Path, hmm: HMM, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Write the card, and the curve if matplotlib is there to draw it."""
    drawn = _draw(folder / CURVE_FILE, metrics)
    with _io.atomic_write(folder / CARD_FILE) as scratch:
        scratch.write_text(_text(hmm, curve=drawn), "utf-8")


def _text(hmm: HMM, *, curve: bool) -> str:
    facts, source = hmm.config.distillation, hmm.config.source_model or "a language model"
    parts = [
        _front_matter(hmm.config.source_model),
        f"# A hidden Markov model of {source}\n",
        f"{hmm.num_states:,} states over {hmm.vocab_size:,} tokens, distilled with foretrace. It "
        f"steers {source} at decode time:\n",
        USE,
        _likelihoods(facts),
        _memory(facts.get("memory_gain", {})),
        f"![Log-likelihood while training]({CURVE_FILE})\n" if curve else "",
        _how(facts),
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(source: str | None) -> str:
    base = f"base_model: {source}\n" if source is not None and "/" in source else ""
    return f"---\nlibrary_name: foretrace\ntags:\n- foretrace\n- hidden-markov-model\n{base}---\n"


def _likelihoods(facts: Mapping[str, Any]) -> str:
    names = {"held_out": "this HMM", "bigram": "bigram of the corpus", "unigram": "its unigram"}
    found = {name: facts.get(f"{key}_log_likelihood") for key, name in names.items()}
    rows = [f"| {name} | {value:.4f} |\n" for name, value in found.items() if value is not None]
    if not rows:
        return ""
    return "| held-out text | nats per token |\n|---|---|\n" + "".join(rows)


def _memory(gain: Mapping[str, float]) -> str:
    if not gain:
        return ""
    lead = "Nats that a prefix of 12 tokens adds to the log-likelihood of the next k tokens:\n\n"
    heads = "| k | " + " | ".join(gain) + " |\n" + "|---" * (len(gain) + 1) + "|\n"
    return lead + heads + "| gain | " + " | ".join(f"{nats:.3f}" for nats in gain.values()) + " |\n"


def _how(facts: Mapping[str, Any]) -> str:
    told = {**facts, **facts.get("settings", {})}
    apart = {"settings", "memory_gain", "em"}  # shown elsewhere, or one by one
    rows = [f"- {name}: {told[name]}\n" for name in sorted(told) if name not in apart]
    return "## How it was made\n\n" + "".join(rows)


def _draw(path: Path, metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Draw the log-likelihood of batches and of held-out rows against the tokens read."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    steps = [row["step"] for row in metrics]
    axes.plot(steps, [row["log_likelihood"] for row in metrics], lw=0.8, label="training batches")
    measured = [row for row in metrics if row.get("held_out") is not None]
    axes.plot(
        [row["step"] for row in measured],
        [row["held_out"] for row in measured],
        marker="o",
        ms=3,
        label="held-out rows",
    )
    if measured and measured[-1].get("baselines"):
        for style, (name, value) in zip(
            ("--", ":"), measured[-1]["baselines"].items(), strict=True
        ):
            axes.axhline(value, ls=style, lw=1, color="gray", label=name)
    axes.set(xlabel="EM steps", ylabel="nats per token")
    axes.legend()
    with _io.atomic_write(path) as scratch:
        figure.savefig(scratch, format="png", dpi=150)
    return True
