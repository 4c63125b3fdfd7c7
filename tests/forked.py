"""Processes that start with the heavy imports done, forked from a process that did them once.

A new Python process that imports torch and transformers takes four seconds, a fork of such a
process a tenth of a second. Otherwise it is a process like others: it has its own environment,
folder, output and exit code, and can be killed.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT = 500  # seconds

_context = get_context("forkserver")
_context.set_forkserver_preload(["heavy_imports"])


class Done(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]
"""The fixture `run`: a function from the words of a command to its result."""


def start(
    target: Callable[..., object],
    *arguments: Any,
    stdout: Path | None = None,
    stderr: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """Start a process that calls a function of a module; its output is appended to files."""
    _start_server()
    settings = (stdout, stderr, {**os.environ, **(environment or {})}, Path.cwd())
    process = _context.Process(target=_enter, args=(settings, target, arguments))
    process.start()
    return process


def run_foretrace(
    *arguments: object, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command of foretrace until it ends, as `subprocess.run` does."""
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as scratch:
        stdout, stderr = Path(scratch) / "stdout", Path(scratch) / "stderr"
        process = start(foretrace, words, stdout=stdout, stderr=stderr, environment=environment)
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, TIMEOUT)
        output = (file.read_text("utf-8", "replace") for file in (stdout, stderr))
        return subprocess.CompletedProcess(words, process.exitcode, *output)


def foretrace(words: list[str]) -> None:
    """Run a command of foretrace, as a target of `start`."""
    from foretrace import cli

    cli.main(words)


def script(text: str, *arguments: object) -> None:
    """Run a script, as a target of `start` and as `python -c` does."""
    sys.argv = ["-c", *map(str, arguments)]
    exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})


@cache
def _start_server() -> None:
    """Start the process to fork from; it must find `heavy_imports` on PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _enter(
    settings: tuple[Path | None, Path | None, dict[str, str], Path],
    target: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    """Give the forked process its output, environment and folder, and call the function."""
    stdout, stderr, environment, folder = settings
    for descriptor, path in ((1, stdout), (2, stderr)):
        if path is not None:
            with path.open("ab") as file:
                os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    search = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in search if path and path not in sys.path]
    target(*arguments)
