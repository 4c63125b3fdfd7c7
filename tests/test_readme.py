"""What the README and the docs say runs, runs."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from foretrace.distill import Corpus, Manifest

PROJECT = Path(__file__).parent.parent


def run_examples(page: Path, folder: Path, before: str = "") -> tuple[list[str], str]:
    """Run the Python examples of a page in a folder; give them, and what they printed."""
    examples = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join([before, *examples])],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return examples, ran.stdout


def test_the_ten_lines_run(tmp_path: Path) -> None:
    examples, printed = run_examples(PROJECT / "README.md", tmp_path)
    assert 8 <= len(examples[0].strip().splitlines()) <= 12
    assert "HMM(64 states, 5000 tokens" in printed
    assert (tmp_path / "my-hmm" / "config.json").exists()
    command = Path(sys.executable).with_name("foretrace")
    shown = subprocess.run([command, "hmm", "show", "my-hmm"], cwd=tmp_path, check=False)
    assert shown.returncode == 0


def test_the_training_example_runs(tmp_path: Path) -> None:
    corpus = Corpus.create(tmp_path / "corpus", Manifest(length=8, vocab_size=50, eos_token_id=3))
    corpus.append(torch.randint(4, 50, (400, 8)))
    run_examples(PROJECT / "docs" / "em.md", tmp_path)
    assert (tmp_path / "my-hmm" / "metrics.jsonl").exists()


def test_the_example_of_attributes_runs(tmp_path: Path) -> None:
    before = """
import foretrace
hmm = foretrace.HMM.random(4, 20)
token_ids, scores = [[1, 2, 3], [4, 5], [1, 5, 6], [4, 2, 7]] * 20, [0.9, 0.2, 0.9, 0.1] * 20
"""
    run_examples(PROJECT / "docs" / "attributes.md", tmp_path, before)
    assert (tmp_path / "nontoxic.safetensors").exists()
