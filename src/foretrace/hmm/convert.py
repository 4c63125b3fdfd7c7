"""Reading the HMMs that others have published: the checkpoints of TRACE and of Ctrl-G.

Both store `alpha_exp` (h, h), the transition's probabilities, and `beta` (h, V), the emission's
logarithms, state-major. The initial distribution is `gamma_exp` (1, h), probabilities, in TRACE's
and `gamma`, logarithms, in Ctrl-G's. Only safetensors are read: a pickle runs whatever is in it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened

import torch
from torch import Tensor

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidModelError
from foretrace.hmm.config import HMMConfig, is_integer
from foretrace.hmm.model import HMM
from foretrace.hmm.probability import chunks

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"


def read_published(source: str | os.PathLike[str], *, revision: str | None = None) -> HMM:
    """Read a checkpoint of TRACE or Ctrl-G: a local folder, or a repository of the hub."""
    folder = _io.locate(source, revision, [CONFIG_FILE, TENSOR_FILE])
    path = folder / TENSOR_FILE
    settings = _io.read_json(folder / CONFIG_FILE)
    try:
        tensors, _ = _io.read_tensors(path)
    except InvalidFileError as error:
        raise InvalidFileError(
            f"{error} If the checkpoint is a pickle (pytorch_model.bin), which foretrace never "
            f"opens since it can run code, load it where you trust it and save it with safetensors."
        ) from error
    initial = _initial(tensors, path)
    states = initial.numel()
    transition = _io.take_tensor(tensors, "alpha_exp", (states, states), path)
    vocab = tensors["beta"].shape[-1] if "beta" in tensors and tensors["beta"].dim() else 0
    log_emission = _io.take_tensor(tensors, "beta", (states, vocab), path)
    config = HMMConfig(
        eos_token_ids=_eos_token_ids(settings.get("eos_token_id"), folder / CONFIG_FILE),
        distillation={"converted_from": str(source) if folder != Path(source) else folder.name},
    )
    try:
        return HMM(initial, transition, _token_major_exponential(log_emission), config)
    except InvalidModelError as error:
        raise InvalidFileError(f"{path}: {error}") from error


def _eos_token_ids(value: object, path: Path) -> tuple[int, ...]:
    token_ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(map(is_integer, token_ids)):
        raise InvalidFileError(
            f"{path}: eos_token_id is {shortened(value)}, but must be an integer, a list of "
            f"integers, or null."
        )
    return tuple(token_ids)


def _initial(tensors: Mapping[str, Tensor], path: Path) -> Tensor:
    if "gamma_exp" in tensors:  # TRACE
        return tensors["gamma_exp"].flatten()
    if "gamma" in tensors:  # Ctrl-G
        return tensors["gamma"].flatten().exp()
    raise InvalidFileError(
        f"{path} has neither 'gamma_exp' (TRACE) nor 'gamma' (Ctrl-G), but "
        f"{', '.join(sorted(tensors)) or 'no tensors'}. Is it one of their checkpoints?"
    )


def _token_major_exponential(log_emission: Tensor) -> Tensor:
    """Turn (h, V) logarithms into (V, h) probabilities, a few megabytes at a time."""
    states, vocab = log_emission.shape
    emission = torch.empty(vocab, states, dtype=log_emission.dtype)
    for rows, chunk in chunks(log_emission):
        emission[:, rows] = chunk.exp().T
    return emission
