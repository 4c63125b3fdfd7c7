"""Read and write probes: one safetensors file, with the config in its header."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from foretrace import _io
from foretrace.errors import InvalidFileError

FORMAT_VERSION = 1
HEADER_KEY = "foretrace_probe"
TYPES = {
    "tokens": (torch.int32, torch.int64),
    "inverse": (torch.float32,),
    "checks": (torch.float32,),
    "rows": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "bias": (torch.float32,),
    "features": (torch.float16,),
    "basis": (torch.float32,),
}


@dataclass(frozen=True)
class ProbeConfig:
    """What a probe knows of its LM's head, and how well it reads it.

    Attributes:
        fingerprint: `Head.fingerprint` of the head.
        original: `Head.fingerprint` of the head that this one was quantised from; None if it was
            not. Attributes of the original LM are accepted.
        source: The name of the LM.
        scale: The factor of all logits.
        softcap: The tanh cap of the logits; None if there is none.
        condition: The condition number of the probe's rows.
        variance_kept: The share of the rows' variance that the token features keep.
        errors: Relative errors of hidden states, the largest of those measured, by the logits
            they were read from.
    """

    fingerprint: str = ""
    original: str | None = None
    source: str | None = None
    scale: float = 1.0
    softcap: float | None = None
    condition: float = 0.0
    variance_kept: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)


def write(path: Path, tensors: Mapping[str, Tensor], config: ProbeConfig) -> None:
    """Write the file atomically."""
    header = {"format_version": FORMAT_VERSION, **asdict(config)}
    stored = {**tensors, "tokens": tensors["tokens"].int()}
    _io.write_tensors(path, stored, {HEADER_KEY: _io.to_json(path, header)})


def read(path: Path) -> tuple[dict[str, Tensor], ProbeConfig]:
    """Map and check a file that `write` wrote."""
    if not path.is_file():
        raise InvalidFileError(
            f"There is no file {path}. Pass a file that `foretrace probe` or Probe.save wrote."
        )
    tensors, metadata = _io.read_tensors(path)
    config = _read_header(metadata.get(HEADER_KEY, ""), path)
    none = torch.zeros(0, 0)
    width = tensors.get("rows", none).shape[-1:].numel()
    size = tensors.get("tokens", none).numel()
    shapes = {
        "tokens": (size,),
        "inverse": (width, size),
        "checks": (*tensors.get("checks", none).shape[:1], size),
        "rows": (size, width),
        "bias": (size,),
        "features": (*tensors.get("features", none).shape, 0, 0)[:2],
        "basis": (width, *tensors.get("features", none).shape[1:]),
    }
    checked = {name: _io.take_tensor(tensors, name, shape, path) for name, shape in shapes.items()}
    for name, tensor in checked.items():
        if tensor.dtype not in TYPES[name]:
            raise _damaged(path, f"tensor '{name}' has type {tensor.dtype}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise _damaged(path, f"tensor '{name}' has values that are not finite")
    tokens = checked["tokens"] = checked["tokens"].long()
    if not size or tokens[0] < 0 or tokens[-1] >= shapes["features"][0]:
        raise _damaged(path, "its tokens are outside the vocabulary")
    if not bool((tokens.diff() > 0).all()):
        raise _damaged(path, "its tokens are not ascending")
    return checked, config


def _damaged(path: Path, problem: str) -> InvalidFileError:
    return InvalidFileError(f"{path} is damaged ({problem}). Make it again.")


def _read_header(header: str, path: Path) -> ProbeConfig:
    version, content = _io.parse_header(
        header, f"{path} is not a probe. Pass a file that `foretrace probe` or Probe.save wrote."
    )
    if version != FORMAT_VERSION:
        raise InvalidFileError(
            f"{path} has format version {version!r}, but this foretrace reads version "
            f"{FORMAT_VERSION}. Upgrade foretrace, or make the probe again."
        )
    names = {entry.name for entry in fields(ProbeConfig)}
    config = ProbeConfig(**{key: value for key, value in content.items() if key in names})
    factors = [config.scale, 1.0 if config.softcap is None else config.softcap]
    if not all(map(_is_positive, factors)):
        raise _damaged(path, "the scale or the cap of logits is no number above zero")
    return config


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")
