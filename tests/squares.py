"""A stage that needs no LM: it writes the squares of numbers, each to a file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from foretrace import _io
from foretrace.distill.executor import Load, Produce


def stage(folder: Path, size: int = 1) -> Load:
    """Return the stage that writes the square of each number; it needs no LM."""

    @contextmanager  # a function within a function, which Ray sends by value
    def load() -> Iterator[Produce]:
        def produce(number: int) -> int:
            time.sleep(0.1)
            content = {"square": torch.full((size,), number**2)}
            _io.write_tensors(folder / f"{number}.safetensors", content, {})
            return 1

        yield produce

    return load


def read(folder: Path) -> dict[str, int]:
    return {
        path.name: int(_io.read_tensors(path)[0]["square"][0]) for path in sorted(folder.iterdir())
    }
