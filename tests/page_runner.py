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
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent
BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```', re.DOTALL | re.MULTILINE)
SERVERS = ("foretrace serve", "foretrace playground", "python -m vllm")
SLOWEST_START = 300  # seconds


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
    if any(f"\n{each}" in f"\n{text}" for each in SERVERS):
        rest = [line for line in text.splitlines() if not line.startswith("pip install")]
        start(servers, "\n".join(rest))
        return
    lines = text.replace("\\\n", " ").splitlines()
    while lines:
        line = lines.pop(0)
        while line.count("'") % 2:  # a quoted text goes on
            line = f"{line}\n{lines.pop(0)}"
        words = shlex.split(line, comments=True)
        given = [words.pop(0) for each in list(words) if re.match(r"[A-Z_]+=", each)]
        if words[:1] == ["export"]:
            os.environ.update(dict(each.split("=", 1) for each in words[1:]))
        elif words[:2] == ["pip", "install"]:
            require_extras(words[2:])
        elif words[:1] == ["foretrace"]:
            foretrace(words)
        elif words[:1] == ["python"] and words[1].startswith("benchmarks/"):
            subprocess.run(["python", PROJECT / words[1], "--help"], check=True)
        elif words:
            subprocess.run(["bash", "-euo", "pipefail", "-c", " ".join([*given, line])], check=True)


def foretrace(words: list[str]) -> None:
    """Run a command of foretrace in this process."""
    from foretrace import cli

    print("$", shlex.join(words), flush=True)  # noqa: T201
    sys.argv = words
    try:
        cli.main()
    except SystemExit as stopped:
        if stopped.code:
            raise RuntimeError(f"{shlex.join(words)} ended with {stopped.code}") from None


def start(servers: ExitStack, command: str) -> None:
    """Start a server, and wait until it answers; the one before has its place no more."""
    servers.close()
    address = "http://127.0.0.1:7860/"
    if "foretrace playground" not in command:
        address = "http://127.0.0.1:8000/health"
    *before, last = command.strip().replace("\\\n", " ").splitlines()
    script = "\n".join([*before, f"exec {last}"])  # so that to stop it stops the server itself
    process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", script])
    servers.callback(stop, process)
    end = time.monotonic() + SLOWEST_START
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"{command} does not answer.")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server."""
    process.terminate()
    process.wait(60)


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
