"""The model card of a distilled HMM, with its training curve."""

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
    """Write the card, and the training curve if matplotlib is installed."""
    has_curve = _draw(folder / CURVE_FILE, metrics)
    with _io.atomic_write(folder / CARD_FILE) as scratch:
        scratch.write_text(_text(hmm, curve=has_curve), "utf-8")


def _text(hmm: HMM, *, curve: bool) -> str:
    facts, source = hmm.config.distillation, hmm.config.source_model or "a language model"
    sections = [
        _front_matter(hmm.config.source_model),
        f"# A hidden Markov model of {source}\n",
        f"{hmm.num_states:,} states over {hmm.vocab_size:,} tokens, distilled with foretrace. It "
        f"steers {source} at decode time:\n",
        USE,
        _likelihood_table(facts),
        _gain_table(facts.get("memory_gain", {})),
        f"![Log-likelihood while training]({CURVE_FILE})\n" if curve else "",
        _settings_list(facts),
    ]
    return "\n".join(section for section in sections if section)


def _front_matter(source: str | None) -> str:
    base = f"base_model: {source}\n" if source is not None and "/" in source else ""
    return f"---\nlibrary_name: foretrace\ntags:\n- foretrace\n- hidden-markov-model\n{base}---\n"


def _likelihood_table(facts: Mapping[str, Any]) -> str:
    names = {"held_out": "this HMM", "bigram": "bigram of the corpus", "unigram": "its unigram"}
    values = {name: facts.get(f"{key}_log_likelihood") for key, name in names.items()}
    rows = [f"| {name} | {value:.4f} |\n" for name, value in values.items() if value is not None]
    if not rows:
        return ""
    return "| held-out text | nats per token |\n|---|---|\n" + "".join(rows)


def _gain_table(gain: Mapping[str, float]) -> str:
    if not gain:
        return ""
    caption = "Nats that a prefix of 12 tokens adds to the log-likelihood of the next k tokens:\n\n"
    header = "| k | " + " | ".join(gain) + " |\n" + "|---" * (len(gain) + 1) + "|\n"
    values = "| gain | " + " | ".join(f"{nats:.3f}" for nats in gain.values()) + " |\n"
    return caption + header + values


def _settings_list(facts: Mapping[str, Any]) -> str:
    settings = {**facts, **facts.get("settings", {})}
    omitted = {"settings", "memory_gain", "em"}  # shown elsewhere, or entry by entry
    rows = [f"- {name}: {settings[name]}\n" for name in sorted(settings) if name not in omitted]
    return "## How it was made\n\n" + "".join(rows)


def _draw(path: Path, metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Plot the log-likelihood of batches and of held-out rows; return False without matplotlib."""
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
