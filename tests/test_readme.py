"""What the README says runs, runs."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


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
