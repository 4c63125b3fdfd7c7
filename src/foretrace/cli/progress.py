"""Progress on the terminal: one bar per stage, with rate and time left."""

from types import TracebackType
from typing import Self


class Bars:
    """A bar for every stage that has begun; of work that goes on when it is begun again, or not."""

    def __init__(self, *, visible: bool = True, resumes: bool = True) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            disable=not visible,
        )
        self._tasks: dict[str, int] = {}
        self._resumes = resumes

    def show(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        """Show how far a stage is."""
        if stage not in self._tasks:
            # The rate is of what is done from now on: what a run before has done cost nothing.
            self._tasks[stage] = self._bars.add_task(stage, total=total, rate="", note="")
        task = self._bars.tasks[self._tasks[stage]]
        rate = f"{task.speed:,.3g} {unit}/s" if task.speed else unit
        self._bars.update(task.id, completed=done, total=total, rate=rate, note=note)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()
        if kind is KeyboardInterrupt:
            then = "goes on from what is done" if self._resumes else "begins anew"
            self._bars.console.print(f"Stopped. The same command {then}.")
