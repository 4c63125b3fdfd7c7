"""Convert the published checkpoints of TRACE and Ctrl-G.

Both store `alpha_exp` (h, h), the transition probabilities, and `beta` (h, V), the logarithms of
the emission probabilities, state-major. The initial distribution is `gamma_exp` (1, h) in TRACE
(probabilities) and `gamma` in Ctrl-G (logarithms). Only safetensors files are read, because loading
a pickle can run arbitrary code.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened

import torch
from torch import Tensor

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidModelError
from foretrace.hmm.model import HMM
from foretrace.hmm.probability import chunks
from foretrace.hmm.storage import HMMConfig, is_integer

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"


def read_published(source: str | os.PathLike[str], *, revision: str | None = None) -> HMM:
    """Load a checkpoint of TRACE or Ctrl-G as an `HMM`.

    Args:
        source: A local folder or a Hugging Face hub repository, with `config.json` and
            `model.safetensors`.
        revision: Branch, tag or commit of the hub repository.

    Returns:
        A dense HMM. Its `config.distillation` names the source.

    Raises:
        InvalidFileError: A file is missing or damaged, or it is another kind of checkpoint.

    Example:
        >>> from foretrace.hmm.convert import read_published
        >>> from safetensors.torch import save_file
        >>> (folder / "trace").mkdir()
        >>> tables = {
        ...     "gamma_exp": torch.tensor([[0.5, 0.5]]),
        ...     "alpha_exp": torch.eye(2),
        ...     "beta": torch.full((2, 4), 0.25).log(),
        ... }
        >>> save_file(tables, folder / "trace" / "model.safetensors")
        >>> (folder / "trace" / "config.json").write_text('{"eos_token_id": 3}')
        19
        >>> read_published(folder / "trace")
        HMM(2 states, 4 tokens, dense transition, dense emission, float32, cpu)
    """
    folder = _io.locate(source, revision, [CONFIG_FILE, TENSOR_FILE])
    path = folder / TENSOR_FILE
    settings = _io.read_json(folder / CONFIG_FILE)
    try:
        tensors, _ = _io.read_tensors(path)
    except InvalidFileError as error:
        raise InvalidFileError(
            f"{error} If the checkpoint is a pickle (pytorch_model.bin), foretrace does not "
            f"read it, because it can run code: load it where you trust it, and save it with "
            f"safetensors."
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
    """Convert (h, V) log-probabilities to (V, h) probabilities, a few megabytes at a time."""
    states, vocab = log_emission.shape
    emission = torch.empty(vocab, states, dtype=log_emission.dtype)
    for rows, chunk in chunks(log_emission):
        emission[:, rows] = chunk.exp().T
    return emission
