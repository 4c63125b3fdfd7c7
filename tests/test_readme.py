"""What the README and the docs say runs, runs."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from foretrace.distill import Corpus, Manifest

PROJECT = Path(__file__).parent.parent


def run_example(page: Path, folder: Path) -> tuple[str, str]:
    """Run the one Python example of a page in a folder; give the example and what it printed."""
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return example, ran.stdout


def test_the_ten_lines_run(tmp_path: Path) -> None:
    example, printed = run_example(PROJECT / "README.md", tmp_path)
    assert 8 <= len(example.strip().splitlines()) <= 12
    assert "HMM(64 states, 5000 tokens" in printed
    assert (tmp_path / "my-hmm" / "config.json").exists()
    command = Path(sys.executable).with_name("foretrace")
    shown = subprocess.run([command, "hmm", "show", "my-hmm"], cwd=tmp_path, check=False)
    assert shown.returncode == 0


def test_the_training_example_runs(tmp_path: Path) -> None:
    corpus = Corpus.create(tmp_path / "corpus", Manifest(length=8, vocab_size=50, eos_token_id=3))
    corpus.append(torch.randint(4, 50, (400, 8)))
    run_example(PROJECT / "docs" / "em.md", tmp_path)
    assert (tmp_path / "my-hmm" / "metrics.jsonl").exists()
