"""The command line. Commands import heavy packages when they run."""

import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from foretrace.cli import (
    attribute,
    calibrate,
    distill,
    doctor,
    evaluate,
    explain,
    fit,
    generate,
    hmm,
    playground,
    probe,
    serve,
)
from foretrace.errors import ForetraceError

app = typer.Typer(
    name="foretrace",
    help="Steer language models at decode time.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(epilog=distill.EPILOG)(distill.distill)
app.command(epilog=distill.EM_EPILOG)(distill.em)
app.command(epilog=fit.EPILOG)(fit.fit)
app.command(epilog=calibrate.EPILOG)(calibrate.calibrate)
app.command(epilog=generate.EPILOG)(generate.generate)
app.command(epilog=explain.EPILOG)(explain.explain)
app.command(epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command(epilog=evaluate.FIDELITY_EPILOG)(evaluate.fidelity)
app.command(epilog=serve.EPILOG, context_settings=serve.CONTEXT)(serve.serve)
app.command(epilog=playground.EPILOG)(playground.playground)
app.command(epilog=probe.EPILOG)(probe.probe)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(attribute.app, name="attribute")
app.add_typer(hmm.app, name="hmm")
app.add_typer(evaluate.judge, name="judge")


METAVARS = {  # instead of the name of a Python type
    "<str>": "TEXT",
    "<list[str]>": "TEXT",
    "<path>": "PATH",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "NUMBER",
    "<float range>": "NUMBER",
    "<bool>": "",
}
SYNONYMS = {"--length": "--max-new-tokens", "--max-length": "--max-new-tokens"}


class _Command(TyperCommand):
    """A command that prints a line on a terminal before it imports heavy packages.

    Of an unknown option it suggests a synonym, where typer suggests options of similar spelling.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            # Versions of typer before `display_type` print no names of Python types.
            display_type = getattr(param, "display_type", None)
            if isinstance(param, TyperOption) and param.metavar is None and display_type:
                param.metavar = METAVARS.get(display_type(ctx))
        return list(params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            synonym = SYNONYMS.get(getattr(error, "option_name", None) or "")
            if any(synonym in param.opts for param in self.params):
                error.possibilities = [synonym]  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        if "torch" not in sys.modules and sys.stderr.isatty():
            typer.secho("Loading torch ...", dim=True, err=True)
        return super().invoke(ctx)


for group in (app, attribute.app, hmm.app, evaluate.judge):
    for command in group.registered_commands:
        command.cls = _Command


def _print_version(requested: bool) -> None:
    if requested:
        from foretrace import __version__

        typer.echo(f"foretrace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Steer language models at decode time."""


def avoid_spinning(environment: MutableMapping[str, str]) -> None:
    """Let idle threads of OpenMP sleep, unless the user chose. OpenMP reads this at its import.

    By default they spin for a while, which takes the cores from threads with work.
    """
    if "OMP_WAIT_POLICY" not in environment and "GOMP_SPINCOUNT" not in environment:
        environment.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, by default of this process; print errors as one line, without a traceback."""
    avoid_spinning(os.environ)
    try:
        app(arguments)
    except (ForetraceError, OSError) as error:
        typer.secho(f"foretrace: {error}", fg=typer.colors.RED, err=True)
        sys.exit(1)
