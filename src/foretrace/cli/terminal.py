"""What commands print while they run: progress bars, and the library's warnings."""

import logging
from types import TracebackType
from typing import Self

import typer


class _StderrHandler(logging.Handler):
    """Prints records on standard error, as one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.secho(f"foretrace: {record.getMessage()}", fg=typer.colors.YELLOW, err=True)


_HANDLER = _StderrHandler(logging.WARNING)


def print_warnings() -> None:
    """Print warnings of foretrace from now on; a second call changes nothing."""
    logging.getLogger("foretrace").addHandler(_HANDLER)


class ProgressBars:
    """A context manager that shows one bar per stage.

    If the user presses Ctrl-C, it prints whether the same command resumes or starts over.
    """

    def __init__(self, *, resumes: bool, visible: bool = True, stderr: bool = False) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            disable=not visible,
            console=Console(stderr=stderr),
        )
        self._task_ids: dict[str, int] = {}
        self._resumes = resumes

    def update(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        """Set the progress of a stage, and add its bar at the first call."""
        if stage not in self._task_ids:
            self._announce(f"{stage}: {total:,} {unit}")
            # Add the task at zero, so that the rate leaves out what an earlier run completed.
            self._task_ids[stage] = self._progress.add_task(stage, total=total, rate="", note="")
        task = self._progress.tasks[self._task_ids[stage]]
        rate = f"{task.speed:,.3g} {unit}/s" if task.speed else unit
        self._progress.update(task.id, completed=done, total=total, rate=rate, note=note)

    def _announce(self, line: str) -> None:
        """Print a line where bars would appear only at the end: in a pipe or a log."""
        console = self._progress.console
        if not (console.is_terminal or self._progress.disable):
            console.print(line, highlight=False)
            console.file.flush()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if kind is KeyboardInterrupt:
            action = "resumes where this one stopped" if self._resumes else "starts over"
            self._progress.console.print(f"Stopped. The same command {action}.")
