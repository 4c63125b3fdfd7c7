"""Texts to look at: the first twenty prompts of a file, bare and steered, nothing picked.

Writes the page `docs/results/steering.md`, or with --quick prints four prompts. Set FORETRACE_DATA
to a folder with `detox` and `politics` (JSON Lines under xz).
"""

import json
import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from foretrace._tabular import read_rows, texts
from harness import Report, options
from smollm2 import find_smollm2

ROOT = Path(__file__).parent.parent
GOALS = (
    ("nontoxic", ["--goal", "nontoxic", "--strength", "10", "--shift", "-10"]),
    ("political", ["--goal", "POLITICS", "--strength", "3"]),
)
INTRODUCTION = """# Steered texts

The first twenty prompts of `detox/test_prompts_nontoxic`, continued by SmolLM2-135M-Instruct bare
and toward two goals, with the HMM of `examples/`: nothing is picked, nothing left out. Where
steering had no reason to step in, the texts are the same, since all begin from the same seed.
"Probability" is the attribute's own, of the bare text and of the steered one: it shows that
steering does what it is told, not that a judge would agree.

```bash
FORETRACE_DATA=data python benchmarks/samples.py
```

It fits both attributes by `foretrace fit`, and writes by `foretrace generate` with `{settings}` and
"""
SETTINGS = ["--max-new-tokens", "20", "--top-p", "0.9", "--seed", "0", "--batch-size", "20"]


def main() -> None:
    """Fit two attributes, write, and lay out."""
    given = options(__doc__)
    data = Path(os.environ["FORETRACE_DATA"])
    file = data / "detox" / "test_prompts_nontoxic.jsonl.xz"
    prompts = texts(read_rows(file), "prompt", file)[: 4 if given.quick else 20]
    report = Report("Texts, bare and steered")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _fit(data, folder)
        listed = folder / "prompts.jsonl"
        listed.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        found = {}
        for name, goal in GOALS:
            start = perf_counter()
            found[name] = _write(folder, listed, goal)
            report.add(
                f"{name}: bare and steered, {len(prompts)} prompts", perf_counter() - start, "s"
            )
            for kind, rows in (("steered", found[name]), ("bare", _bare(found[name]))):
                mean = sum(row["probability"][0] for row in rows) / len(rows)
                report.add(f"{name}: attribute's own probability, {kind}", mean, "")
    if given.quick:
        print(_page(found))
    else:
        (ROOT / "docs" / "results" / "steering.md").write_text(_page(found))
    report.publish(given.json)


def _foretrace(*arguments: object) -> str:
    command = [sys.executable, "-m", "foretrace", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _fit(data: Path, folder: Path) -> None:
    common = ["--tokenizer", find_smollm2(), "--out"]
    toxic = ["--score", "toxicity", "--invert", *common, folder / "nontoxic.safetensors"]
    _foretrace("fit", data / "detox" / "train.jsonl.xz", *toxic)
    by = ["--text", "description", "--by", "category", *common, folder]
    _foretrace("fit", data / "politics" / "train.jsonl.xz", *by)


def _write(folder: Path, prompts: Path, goal: list[str]) -> list[dict[str, Any]]:
    hmm = ["--hmm", ROOT / "examples" / "smollm2-135m", "--attributes", folder]
    asked = [*goal, "--prompts", prompts, "--compare", "--json", *SETTINGS]
    written = _foretrace("generate", find_smollm2(), *hmm, *asked)
    return [json.loads(line) for line in written.split("\n") if line]


def _bare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row["bare"] for row in rows]


def _page(found: dict[str, list[dict[str, Any]]]) -> str:
    """Lay out: of every prompt, the bare text and each goal's, with the attribute's own opinion."""
    lines = [INTRODUCTION.format(settings=" ".join(SETTINGS))]
    lines += [f"- **{name}**: `{' '.join(goal)}`" for name, goal in GOALS]
    for number, rows in enumerate(zip(*found.values(), strict=True), 1):
        lines += ["", f"**{number}.** {_shown(rows[0]['prompt'])} ...", ""]
        lines += ["| | | probability |", "|---|---|---|"]
        lines.append(f"| bare | {_shown(rows[0]['bare']['text'])} | |")
        for name, row in zip(found, rows, strict=True):
            before, after = row["bare"]["probability"][0], row["probability"][0]
            lines.append(f"| {name} | {_shown(row['text'])} | {before:.2f} to {after:.2f} |")
    return "\n".join(lines) + "\n"


def _shown(text: str) -> str:
    """Write a text so that Markdown leaves it as it is."""
    marked = "".join(
        f"\\{each}" if each in "\\`*_{}[]|#~$" else each for each in escape(text, quote=False)
    )
    return " ".join(marked.split())


if __name__ == "__main__":
    main()
