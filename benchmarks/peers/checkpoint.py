"""The state of a training that can be interrupted: its step, its weights and its optimizer."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from foretrace import _io


class Checkpoint:
    """A file beside the part that is trained.

    Args:
        part: The path of the trained part.
        inputs: A checksum of the texts and the settings. A file of others is not restored.
        weights: The trained weights.
        optimizer: Their optimizer.
    """

    def __init__(
        self, part: Path, inputs: str, weights: Sequence[Tensor], optimizer: Optimizer
    ) -> None:
        self.file = part.with_name(f"{part.name}.checkpoint.safetensors")
        self.inputs, self.weights, self.optimizer = inputs, weights, optimizer

    def save(self, step: int, seconds: float) -> None:
        """Write the steps done, the time that they took, and the state."""
        tensors = {"progress": torch.tensor([step, seconds], dtype=torch.float64)}
        for index, weights in enumerate(self.weights):
            tensors[f"{index} weights"] = weights.detach()
            for name, value in self.optimizer.state[weights].items():
                tensors[f"{index} {name}"] = value
        _io.write_tensors(self.file, tensors, {"inputs": self.inputs})

    def restore(self) -> tuple[int, float]:
        """Restore the state; return the steps done and their time, 0 without a file."""
        if not self.file.is_file():
            return 0, 0.0
        tensors, metadata = _io.read_tensors(self.file)
        if metadata.get("inputs") != self.inputs:
            return 0, 0.0
        progress = tensors.pop("progress").tolist()
        with torch.no_grad():
            for index, weights in enumerate(self.weights):
                weights.copy_(tensors.pop(f"{index} weights"))
        for key, tensor in tensors.items():
            index_text, name = key.split(" ", 1)
            # A copy: the file that it maps is replaced by the next checkpoint.
            self.optimizer.state[self.weights[int(index_text)]][name] = tensor.clone()
        return int(progress[0]), progress[1]

    def remove(self) -> None:
        """Remove the file, when the part is complete."""
        self.file.unlink(missing_ok=True)
