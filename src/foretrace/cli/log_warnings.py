"""Print the library's warnings on standard error, as one line each."""

import logging

import typer


class StderrHandler(logging.Handler):
    """Prints records as errors are printed."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record to the current standard error."""
        typer.secho(f"foretrace: {record.getMessage()}", fg=typer.colors.YELLOW, err=True)


HANDLER = StderrHandler(logging.WARNING)


def print_warnings() -> None:
    """Print warnings from now on; a second call changes nothing."""
    logging.getLogger("foretrace").addHandler(HANDLER)
