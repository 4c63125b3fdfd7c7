"""Every verb's help: an example that names only options it has; words that mean the same; codes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperOption

from foretrace import cli

SAME = {  # what must be called the same everywhere
    "hmm": "--hmm",
    "out": "--out",
    "seed": "--seed",
    "device": "--device",
    "dtype": "--dtype",
    "attributes": "--attributes",
}
OTHERS = {"serve": {"--port", "--dtype"}, "em": {"--nproc-per-node"}}  # of vLLM, and torchrun
FORETRACE = Path(sys.executable).with_name("foretrace")


def verbs() -> Iterator[tuple[str, Any]]:
    """List all commands, those of groups with the name of their group before them."""
    waiting: list[tuple[str, Any]] = [("", typer.main.get_command(cli.app))]
    while waiting:
        name, command = waiting.pop(0)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name.strip(), command
        else:
            waiting += [(f"{name} {each}", own) for each, own in inner.items()]


ALL = dict(verbs())


@pytest.mark.parametrize("name", ALL)
def test_help_has_an_example_that_could_be_run(name: str) -> None:
    command = ALL[name]
    assert command.help
    example = command.epilog or ""
    assert example.startswith(f"Example: foretrace {name}")
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    foreign = set(re.findall(r"--[a-z][a-z-]*", example)) - known
    assert not foreign - OTHERS.get(name, set())


@pytest.mark.parametrize("name", ALL)
def test_options_are_called_alike_and_explained(name: str) -> None:
    for each in ALL[name].params:
        if isinstance(each, TyperOption) and each.name != "help":
            assert each.help, f"{name}: {each.opts} says nothing"
            assert each.name is None or SAME.get(each.name, each.opts[0]) in each.opts


def test_exit_codes() -> None:
    """0 if it went well, 1 if it could not be done, 2 if it was asked wrongly."""
    for code, arguments in (
        (0, ["--version"]),
        (0, ["hmm", "show", "--help"]),
        (1, ["hmm", "show", "no/such/folder"]),
        (2, ["hmm", "show"]),
        (2, ["nonsense"]),
        (2, ["hmm", "show", "x", "--nonsense"]),
    ):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([FORETRACE, *arguments], capture_output=True, env=environment)
        assert done.returncode == code, (arguments, done.stderr)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete(shell: str) -> None:
    environment = {**os.environ, "_FORETRACE_COMPLETE": f"source_{shell}"}
    done = subprocess.run([FORETRACE], capture_output=True, text=True, env=environment)
    assert "foretrace" in done.stdout
    asked = {
        **os.environ,
        "_FORETRACE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "foretrace dis",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "foretrace dis",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run([FORETRACE], capture_output=True, text=True, env=asked)
    assert "distill" in done.stdout
