"""Run the commands and snippets of a page of the documentation, in order, in the current folder.

    python -W error page_runner.py PAGE '{OLD: NEW, ...}' [SECTION ...]

Every OLD in the page is replaced by NEW, a smaller number for example. Sections that are named are
left out. Commands of foretrace run in this process, because a new one spends seconds on imports.
Servers run in processes of their own until the page ends. `pip install` is not run, but the extras
must exist. Benchmarks need hours or data, so that only their `--help` runs.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from socket import SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

from server import free_port, wait_for

PROJECT = Path(__file__).parent.parent
BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```', re.DOTALL | re.MULTILINE)
PLAYGROUND = "foretrace playground"
SERVERS = ("foretrace serve", PLAYGROUND, "python -m vllm")


def sections(page: Path) -> list[str]:
    """Return the headings of a page's sections."""
    return re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)


def blocks(page: Path, without: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Yield language, file name and text of every code block, but not of the sections `without`."""
    content = page.read_text("utf-8")
    for section in without:
        pattern = rf"^## {re.escape(section)}\n.*?(?=^## |\Z)"
        content, found = re.subn(pattern, "", content, flags=re.DOTALL | re.MULTILINE)
        assert found == 1, f"{page.name} has no section '{section}'"
    for _, language, title, text in BLOCK.findall(content):
        yield language, title, text


def run_page(page: Path, replacements: dict[str, str], without: Sequence[str] = ()) -> None:
    """Run a page, but not the sections `without`."""
    names: dict[str, Any] = {"__name__": "__page__"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    sys.path.insert(0, str(Path.cwd()))  # for a judge that the page defines
    with ExitStack() as servers:
        for language, title, text in blocks(page, without):
            for old, new in replacements.items():
                text = text.replace(old, new)
            if title:
                Path(title).write_text(text, "utf-8")
            elif language == "python":
                exec(compile(text, f"{page.name}: {text[:60]}", "exec"), names)
            elif language == "bash":
                run_commands(text, servers)


def run_page_strictly(
    page: Path, folder: Path, replacements: dict[str, str], without: Sequence[str] = ()
) -> None:
    """Run a page in a folder; warnings are errors, as they are with `python -W error`."""
    os.chdir(folder)
    warnings.simplefilter("error")
    run_page(page, replacements, without)


def run_commands(text: str, servers: ExitStack) -> None:
    """Run the lines of a block; a block that starts a server continues in the background."""
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith(SERVERS) for line in lines):
        for line in [line for line in lines if line.startswith("pip install")]:
            lines.remove(line)
            run_command(line)
        start_server(servers, lines)
        return
    while lines:
        line = lines.pop(0)
        while line.count("'") % 2:  # a quoted text continues on the next line
            line = f"{line}\n{lines.pop(0)}"
        run_command(line)


def run_command(line: str) -> None:
    """Run a command: in this process if it is one of the project, else in a shell."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]) and "benchmarks/" in line:
        words.pop(0)  # help needs no data
    if words[:1] == ["export"]:
        os.environ.update(dict(word.split("=", 1) for word in words[1:]))
    elif words[:2] == ["pip", "install"]:
        require_extras(words[2:])
    elif words[:1] == ["foretrace"]:
        run_foretrace(words)
    elif words[:1] == ["python"] and words[1].startswith("benchmarks/"):
        run_benchmark_help(PROJECT / words[1])
    elif words:
        subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=True)


def run_foretrace(words: list[str]) -> None:
    """Run a command of foretrace in this process."""
    from foretrace import cli

    print("$", shlex.join(words), file=sys.stderr, flush=True)  # noqa: T201
    sys.argv = words
    try:
        cli.main()
    except SystemExit as stopped:
        if stopped.code:
            raise RuntimeError(f"{shlex.join(words)} ended with {stopped.code}") from None


def run_benchmark_help(script: Path) -> None:
    """Run a benchmark with `--help` in this process."""
    sys.argv = [str(script), "--help"]
    sys.path.insert(0, str(script.parent))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stopped:
            if stopped.code:
                raise RuntimeError(f"{script.name} --help ended with {stopped.code}") from None


def start_server(servers: ExitStack, lines: list[str]) -> None:
    """Stop the server before, start another one, and wait until it answers."""
    servers.close()
    port, ready = 8000, "health"
    if lines[-1].startswith(PLAYGROUND):
        port, ready = free_port(), ""  # other pages start playgrounds too
        lines[-1] += f" --port {port}"
    with socket() as probe:  # fails if another server would answer instead
        probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)], start_new_session=True
    )
    servers.callback(stop_server, process)
    wait_for(process, f"http://127.0.0.1:{port}/{ready}")


def stop_server(process: "subprocess.Popen[bytes]") -> None:
    """End a server and all processes that it has started."""
    for signal in (SIGTERM, SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal)
            process.wait(30)


def require_extras(requirements: list[str]) -> None:
    """Check that a requirement is this project, with extras that it defines."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    for requirement in requirements:
        match = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", requirement)
        if match is None:
            raise RuntimeError(f"pip install {requirement}: not this project")
        if unknown := set((match[1] or "").split(",")) - {"", *project["optional-dependencies"]}:
            raise RuntimeError(f"pip install {requirement}: there is no {unknown}")


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
