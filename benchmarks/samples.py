"""Generate unselected examples: the first twenty prompts of a file, unsteered and steered.

Writes the page `docs/results/steering.md`; with --quick, prints three prompts. Set FORETRACE_DATA
to a folder with `detox` (JSON Lines, compressed with xz).
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
GOALS = {
    "nontoxic": ["--goal", "nontoxic"],
    "positive": ["--goal", "positive"],
    "political, strong": ["--goal", "political", "--level", "strong"],
}
INTRODUCTION = """# Steered texts

The first twenty prompts of `detox/test_prompts_nontoxic`, continued by SmolLM2-135M-Instruct
without steering (`bare`) and toward three goals, with the HMM and the attributes of `examples/`.
Nothing is selected or left out. All texts start from the same seed, so they are equal where
steering changed no token. "Probability" is the attribute's own score of the unsteered and of the
steered text: it shows that steering reaches its target, not that an independent judge would agree.

```bash
FORETRACE_DATA=data python benchmarks/samples.py
```

The script generates with `foretrace generate`. The options are `{settings}` and, for each goal:
"""
SETTINGS = ["--max-new-tokens", "20", "--top-p", "0.9", "--seed", "0", "--batch-size", "20"]


def main() -> None:
    """Generate, and write the page."""
    arguments = options(__doc__)
    data = Path(os.environ["FORETRACE_DATA"])
    file = data / "detox" / "test_prompts_nontoxic.jsonl.xz"
    prompts = texts(read_rows(file), "prompt", file)[: 3 if arguments.quick else 20]
    report = Report("Texts, bare and steered")
    with tempfile.TemporaryDirectory() as scratch:
        prompt_file = Path(scratch) / "prompts.jsonl"
        prompt_file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        generations = {}
        for name in [*GOALS][: 1 if arguments.quick else None]:
            start = perf_counter()
            generations[name] = _generate(prompt_file, GOALS[name])
            report.add(
                f"{name}: bare and steered, {len(prompts)} prompts", perf_counter() - start, "s"
            )
            for kind, rows in (("steered", generations[name]), ("bare", _bare(generations[name]))):
                mean = sum(row["probability"][0] for row in rows) / len(rows)
                report.add(f"{name}: attribute probability, {kind}", mean, "")
    if arguments.quick:
        print(_page(generations))
    else:
        (ROOT / "docs" / "results" / "steering.md").write_text(_page(generations))
    report.publish(arguments.json)


def _foretrace(*arguments: object) -> str:
    command = [sys.executable, "-m", "foretrace", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _generate(prompts: Path, goal: list[str]) -> list[dict[str, Any]]:
    examples = ROOT / "examples"
    hmm = ["--hmm", examples / "smollm2-135m", "--attributes", examples / "attributes"]
    flags = [*goal, "--prompts", prompts, "--compare", "--json", *SETTINGS]
    output = _foretrace("generate", find_smollm2(), *hmm, *flags)
    return [json.loads(line) for line in output.split("\n") if line]


def _bare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row["bare"] for row in rows]


def _page(generations: dict[str, list[dict[str, Any]]]) -> str:
    """Format a table for every prompt: the unsteered text, and the text and change of each goal."""
    lines = [INTRODUCTION.format(settings=" ".join(SETTINGS))]
    lines += [f"- **{name}**: `{' '.join(goal)}`" for name, goal in GOALS.items()]
    for number, rows in enumerate(zip(*generations.values(), strict=True), 1):
        lines += ["", f"**{number}.** {_escaped(rows[0]['prompt'])} ...", ""]
        lines += ["| | | probability |", "|---|---|---|"]
        lines.append(f"| bare | {_escaped(rows[0]['bare']['text'])} | |")
        for name, row in zip(generations, rows, strict=True):
            before, after = row["bare"]["probability"][0], row["probability"][0]
            lines.append(f"| {name} | {_escaped(row['text'])} | {before:.2f} to {after:.2f} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Escape a text for a Markdown table."""
    escaped = "".join(
        f"\\{char}" if char in "\\`*_{}[]|#~$" else char for char in escape(text, quote=False)
    )
    return " ".join(escaped.split())


if __name__ == "__main__":
    main()
