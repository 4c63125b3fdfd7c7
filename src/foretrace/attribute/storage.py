"""An attribute on disk: one safetensors file, with all that is known of it in the header."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrace import _io
from foretrace.attribute.automata.dfa import Automaton
from foretrace.attribute.automata.weighted import Memory
from foretrace.attribute.config import AttributeConfig
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidFileError, InvalidInputError

FORMAT_VERSION, WITHOUT_MEMORY = 2, 1  # who reads 1 alone must not pass by what is remembered
HEADER_KEY = "foretrace_attribute"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Stored(NamedTuple):
    """What a file holds: the parts of an attribute."""

    terms: Terms
    config: AttributeConfig


def write(path: Path, terms: Terms, config: AttributeConfig) -> None:
    """Write the file, whole or not at all."""
    tensors = {
        "coefficients": terms.coefficients,
        "tokens": terms.tokens,
        "log_weights": terms.log_weights,
    }
    version = WITHOUT_MEMORY
    if terms.memory is not None:
        version, automaton = FORMAT_VERSION, terms.memory.automaton
        tensors |= {
            "automaton_tokens": automaton.tokens,
            "automaton_classes": automaton.classes,
            "automaton_moves": automaton.moves,
            "finals": terms.memory.finals,
        }
    header = {"format_version": version, **asdict(config)}
    _io.write_tensors(path, tensors, {HEADER_KEY: _io.to_json(path, header)})


def read(path: Path) -> Stored:
    """Read what `write` wrote."""
    if not path.is_file():
        raise InvalidFileError(
            f"There is no file {path}. Give one that `foretrace fit` or Attribute.save wrote."
        )
    tensors, metadata = _io.read_tensors(path)
    version, config = _header(metadata.get(HEADER_KEY, ""), path)
    none = torch.zeros(0)
    shape = tensors.get("coefficients", none).numel(), tensors.get("tokens", none).numel()
    try:
        terms = Terms(
            _floats(tensors, "coefficients", shape[:1], path).to(torch.float64, copy=True),
            _integers(tensors, "tokens", shape[1:], path),
            # A copy: thousands of small mappings of files would cost more than they save.
            _floats(tensors, "log_weights", shape, path).clone(),
            None if version == WITHOUT_MEMORY else _memory(tensors, shape[0], path),
        )
        terms.require_probability()
    except InvalidInputError as error:
        raise InvalidFileError(f"{path} is damaged ({error}). Fit or copy it again.") from error
    return Stored(terms, config)


def _memory(tensors: dict[str, Tensor], terms: int, path: Path) -> Memory:
    none = torch.zeros(0)
    tokens = tensors.get("automaton_tokens", none).numel()
    moves = tuple(tensors.get("automaton_moves", none).shape)
    parts = {"tokens": (tokens,), "classes": (tokens,), "moves": moves}
    given = {
        name: _integers(tensors, f"automaton_{name}", shape, path) for name, shape in parts.items()
    }
    finals = _floats(tensors, "finals", (terms, *moves[:1]), path)
    return Memory(Automaton(**given), finals.to(torch.float64, copy=True))


def _floats(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    """Return a tensor of a file, which must have this shape and a floating-point type."""
    tensor = _io.take_tensor(tensors, name, shape, path)
    if tensor.dtype not in FLOATS:
        raise _wrong_type(path, name, tensor, "float16, bfloat16, float32 or float64")
    return tensor


def _integers(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    """Return a copy of a tensor of integers of a file, which must fit into int32, as int32."""
    tensor = _io.take_tensor(tensors, name, shape, path)
    if tensor.dtype not in INTEGERS:
        raise _wrong_type(path, name, tensor, "integers")
    narrow = tensor.to(torch.int32, copy=True)
    if not torch.equal(narrow.long(), tensor.long()):
        raise InvalidFileError(
            f"{path} is damaged (tensor '{name}' has numbers that no token id or state can be). "
            f"Fit or copy it again."
        )
    return narrow


def _wrong_type(path: Path, name: str, tensor: Tensor, expected: str) -> InvalidFileError:
    return InvalidFileError(
        f"{path}: tensor '{name}' has type {str(tensor.dtype).removeprefix('torch.')}, but "
        f"{expected} was expected. Fit or copy it again."
    )


def _header(header: str, path: Path) -> tuple[int, AttributeConfig]:
    try:
        content: dict[str, Any] = json.loads(header)
        version = content.pop("format_version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidFileError(
            f"{path} is not an attribute. Give a file that `foretrace fit` or Attribute.save wrote."
        ) from None
    if version not in (WITHOUT_MEMORY, FORMAT_VERSION):
        raise InvalidFileError(
            f"{path} has format version {version}, but this foretrace reads {WITHOUT_MEMORY} "
            f"and {FORMAT_VERSION}. Upgrade foretrace, or fit the attribute again."
        )
    known = {entry.name for entry in fields(AttributeConfig)}
    try:
        config = AttributeConfig(**{k: v for k, v in content.items() if k in known})
    except InvalidInputError as error:
        raise InvalidFileError(f"{path} is damaged ({error}). Fit or copy it again.") from error
    return version, config
