"""What the README and the docs say runs, runs."""

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent
README = PROJECT / "README.md"


def test_the_ten_lines_run(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert 8 <= len(example.strip().splitlines()) <= 12
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "HMM(64 states, 5000 tokens" in ran.stdout
    assert (tmp_path / "my-hmm" / "config.json").exists()
    command = Path(sys.executable).with_name("foretrace")
    shown = subprocess.run([command, "hmm", "show", "my-hmm"], cwd=tmp_path, check=False)
    assert shown.returncode == 0


def test_the_training_example_runs(tmp_path: Path) -> None:
    import torch

    from foretrace.distill import Corpus, Manifest

    corpus = Corpus.create(tmp_path / "corpus", Manifest(length=8, vocab_size=50, eos_token_id=3))
    corpus.append(torch.randint(4, 50, (400, 8)))
    page = (PROJECT / "docs" / "em.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "my-hmm" / "metrics.jsonl").exists()
