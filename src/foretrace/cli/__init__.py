"""The command line: one module per command. Commands import heavy packages when they run."""

import logging
import sys

import typer

from foretrace.cli import (
    attribute,
    calibrate,
    distill,
    doctor,
    em,
    evaluate,
    explain,
    fidelity,
    fit,
    generate,
    hmm,
    judge,
    playground,
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
app.command(epilog=em.EPILOG)(em.em)
app.command(epilog=fit.EPILOG)(fit.fit)
app.command(epilog=calibrate.EPILOG)(calibrate.calibrate)
app.command(epilog=generate.EPILOG)(generate.generate)
app.command(epilog=explain.EPILOG)(explain.explain)
app.command(epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command(epilog=fidelity.EPILOG)(fidelity.fidelity)
app.command(epilog=serve.EPILOG, context_settings=serve.CONTEXT)(serve.serve)
app.command(epilog=playground.EPILOG)(playground.playground)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(attribute.app, name="attribute")
app.add_typer(hmm.app, name="hmm")
app.add_typer(judge.app, name="judge")


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


class _StderrHandler(logging.Handler):
    """Prints the warnings of the library as one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record to the current standard error."""
        typer.secho(f"foretrace: {record.getMessage()}", fg=typer.colors.YELLOW, err=True)


HANDLER = _StderrHandler(logging.WARNING)


def main() -> None:
    """Run the command line; print errors of foretrace as one line, without a traceback."""
    logging.getLogger("foretrace").addHandler(HANDLER)  # at most once
    try:
        app()
    except (ForetraceError, OSError) as error:
        typer.secho(f"foretrace: {error}", fg=typer.colors.RED, err=True)
        sys.exit(1)
