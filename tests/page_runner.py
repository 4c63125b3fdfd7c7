"""Runs the commands and snippets of a page of the documentation, in order, in this folder.

    python -W error page_runner.py PAGE '{OLD: NEW, ...}'

Commands of foretrace run in this process, since importing anew takes seconds; servers in one of
their own, until the page ends. What OLD says on the page is NEW here: a smaller number, say.
Installing is not repeated: extras must be those of the project. Benchmarks, which need
hours or data, are asked for their help.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from socket import SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

from server import wait_for

PROJECT = Path(__file__).parent.parent
BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```', re.DOTALL | re.MULTILINE)
SERVERS = ("foretrace serve", "foretrace playground", "python -m vllm")


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Give language, file name and text of every block."""
    for _, language, title, text in BLOCK.findall(page.read_text("utf-8")):
        yield language, title, text


def main(page: Path, replacements: dict[str, str]) -> None:
    """Run a page."""
    names: dict[str, Any] = {"__name__": "__page__"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    sys.path.insert(0, str(Path.cwd()))  # for judges of one's own
    with ExitStack() as servers:
        for language, title, text in blocks(page):
            for old, new in replacements.items():
                text = text.replace(old, new)
            if title:
                Path(title).write_text(text, "utf-8")
            elif language == "python":
                exec(compile(text, f"{page.name}: {text[:60]}", "exec"), names)
            elif language == "bash":
                run_commands(text, servers)


def run_commands(text: str, servers: ExitStack) -> None:
    """Run the lines of a block; one that starts a server goes on in the background."""
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith(SERVERS) for line in lines):
        for line in [line for line in lines if line.startswith("pip install")]:
            lines.remove(line)
            run(line)
        start(servers, lines)
        return
    while lines:
        line = lines.pop(0)
        while line.count("'") % 2:  # a quoted text goes on
            line = f"{line}\n{lines.pop(0)}"
        run(line)


def run(line: str) -> None:
    """Run a command, here if it is known, else in a shell."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]) and "benchmarks/" in line:
        words.pop(0)  # help needs no data
    if words[:1] == ["export"]:
        os.environ.update(dict(each.split("=", 1) for each in words[1:]))
    elif words[:2] == ["pip", "install"]:
        require_extras(words[2:])
    elif words[:1] == ["foretrace"]:
        foretrace(words)
    elif words[:1] == ["python"] and words[1].startswith("benchmarks/"):
        subprocess.run(["python", PROJECT / words[1], "--help"], check=True)
    elif words:
        subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=True)


def foretrace(words: list[str]) -> None:
    """Run a command of foretrace in this process."""
    from foretrace import cli

    print("$", shlex.join(words), file=sys.stderr, flush=True)  # noqa: T201
    sys.argv = words
    try:
        cli.main()
    except SystemExit as stopped:
        if stopped.code:
            raise RuntimeError(f"{shlex.join(words)} ended with {stopped.code}") from None


def start(servers: ExitStack, lines: list[str]) -> None:
    """Start a server, and wait until it answers; the one before has its place no more."""
    servers.close()
    port, ready = (7860, "") if lines[-1].startswith("foretrace playground") else (8000, "health")
    with socket() as one:  # whoever is there would answer in its stead
        one.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)], start_new_session=True
    )
    servers.callback(stop, process)
    wait_for(process, f"http://127.0.0.1:{port}/{ready}")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server, and whatever it has started."""
    for signal in (SIGTERM, SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal)
            process.wait(30)


def require_extras(what: list[str]) -> None:
    """Check that what would be installed is this project, with extras that it has."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    for each in what:
        found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", each)
        if found is None:
            raise RuntimeError(f"pip install {each}: not this project")
        if unknown := set((found[1] or "").split(",")) - {"", *project["optional-dependencies"]}:
            raise RuntimeError(f"pip install {each}: there is no {unknown}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
