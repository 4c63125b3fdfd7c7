"""Help texts: runnable examples, consistent option names, exit codes and shell completion."""

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

from foretrace import __version__, cli
from forked import Run

OPTION_NAMES = {  # parameter -> its option in every command
    "hmm": "--hmm",
    "out": "--out",
    "seed": "--seed",
    "device": "--device",
    "dtype": "--dtype",
    "attributes": "--attributes",
}
FOREIGN_OPTIONS = {"serve": {"--port"}, "em": {"--nproc-per-node"}}  # vLLM, torchrun
FORETRACE = Path(sys.executable).with_name("foretrace")


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield every command; the name of a subcommand includes its group."""
    queue: list[tuple[str, Any]] = [("", typer.main.get_command(cli.app))]
    while queue:
        name, command = queue.pop(0)
        subcommands = getattr(command, "commands", None)
        if subcommands is None:
            yield name.strip(), command
        else:
            queue += [(f"{name} {key}", subcommand) for key, subcommand in subcommands.items()]


COMMANDS = dict(all_commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_valid_example(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    example = command.epilog or ""
    assert example.startswith(f"Example: foretrace {name}")
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    foreign = set(re.findall(r"--[a-z][a-z-]*", example)) - known
    assert not foreign - FOREIGN_OPTIONS.get(name, set())


@pytest.mark.parametrize("name", COMMANDS)
def test_options_have_help_and_consistent_names(name: str) -> None:
    for param in COMMANDS[name].params:
        if isinstance(param, TyperOption) and param.name != "help":
            assert param.help, f"{name}: {param.opts} has no help"
            assert param.name is None or OPTION_NAMES.get(param.name, param.opts[0]) in param.opts


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_no_python_types(name: str) -> None:
    command = COMMANDS[name]
    for param in command.get_params(typer.Context(command)):
        if isinstance(param, TyperOption):
            record = param.get_help_record(typer.Context(command))
            assert not re.search(
                r"<(bool|str|int|float|path|list)\b[^|\d]", record[0] if record else ""
            )


def test_exit_codes(run: Run) -> None:
    """0 for success, 1 for an error, 2 for wrong usage."""
    for code, arguments in (
        (0, ["hmm", "show", "--help"]),
        (1, ["hmm", "show", "no/such/folder"]),
        (2, ["hmm", "show"]),
        (2, ["nonsense"]),
        (2, ["hmm", "show", "x", "--nonsense"]),
    ):
        assert run(*arguments).code == code, arguments


def test_an_unknown_option_suggests_a_known_one(run: Run) -> None:
    for option, known in (("--length", "max-new-tokens"), ("--goals", "goal")):
        done = run("generate", "my-lm", option, "3")
        assert (done.code, done.out) == (2, "")
        assert f"No such option: {option}" in done.err
        assert f"--{known}" in done.err.split(option, 1)[1]


def test_the_installed_command() -> None:
    done = subprocess.run([FORETRACE, "--version"], capture_output=True, text=True)
    assert done.stdout == f"foretrace {__version__}\n"
    assert subprocess.run([FORETRACE, "nonsense"], capture_output=True).returncode == 2


@pytest.mark.parametrize(
    ("before", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "9"}, None)],
)
def test_idle_threads_sleep_unless_the_user_chose(
    before: dict[str, str], policy: str | None
) -> None:
    environment = dict(before)
    cli.avoid_spinning(environment)
    assert environment.get("OMP_WAIT_POLICY") == policy
    assert environment.get("GOMP_SPINCOUNT") == (before or {"GOMP_SPINCOUNT": "0"}).get(
        "GOMP_SPINCOUNT"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="opens a pseudo-terminal")
def test_a_line_precedes_heavy_imports_on_a_terminal() -> None:
    terminal, stderr = os.openpty()
    command = [str(FORETRACE), "hmm", "show", "no/such/folder"]
    with subprocess.Popen(command, stderr=stderr) as process:
        line = os.read(terminal, 100)
        process.kill()
    os.close(terminal)
    os.close(stderr)
    assert b"Loading torch" in line
    assert b"Loading" not in subprocess.run(command, capture_output=True).stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    environment = {**os.environ, "_FORETRACE_COMPLETE": f"source_{shell}"}
    done = subprocess.run([FORETRACE], capture_output=True, text=True, env=environment)
    assert "foretrace" in done.stdout
    completion = {
        **os.environ,
        "_FORETRACE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "foretrace dis",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "foretrace dis",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run([FORETRACE], capture_output=True, text=True, env=completion)
    assert "distill" in done.stdout


def test_levels_are_those_of_the_library() -> None:
    from foretrace.cli.goal_options import Level
    from foretrace.lookahead.levels import BUDGETS, DEFAULT_LEVEL

    assert list(Level) == list(BUDGETS)
    assert DEFAULT_LEVEL == Level.MEDIUM
