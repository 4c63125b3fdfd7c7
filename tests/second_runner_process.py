"""Run `second_runner.py` in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from foretrace.engines.vllm.settings import Settings

PROGRAM = Path(__file__).parent / "second_runner.py"


def run_second_runner(
    model: Path, requests: list[dict[str, Any]], settings: Settings, num_drafts: int = 0
) -> dict[str, Any]:
    """Return the generated tokens of each request, and how many of them were drafted."""
    done = subprocess.run(
        [sys.executable, PROGRAM, model, str(num_drafts)],
        input=json.dumps(requests),
        env={**os.environ, **settings.to_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
