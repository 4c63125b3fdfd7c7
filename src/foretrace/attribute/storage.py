"""An attribute on disk: one safetensors file, with all that is known of it in the header."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foretrace import _io
from foretrace.attribute.config import AttributeConfig
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidFileError, InvalidInputError

FORMAT_VERSION = 1
HEADER_KEY = "foretrace_attribute"


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
    header = {"format_version": FORMAT_VERSION, **asdict(config)}
    _io.write_tensors(path, tensors, {HEADER_KEY: _io.to_json(path, header)})


def read(path: Path) -> Stored:
    """Read what `write` wrote."""
    if not path.is_file():
        raise InvalidFileError(
            f"There is no file {path}. Give one that `foretrace fit` or Attribute.save wrote."
        )
    tensors, metadata = _io.read_tensors(path)
    config = _config(metadata.get(HEADER_KEY, ""), path)
    none = torch.zeros(0)
    shape = tensors.get("coefficients", none).numel(), tensors.get("tokens", none).numel()
    try:
        terms = Terms(
            _io.take_tensor(tensors, "coefficients", shape[:1], path).to(torch.float64, copy=True),
            _io.take_tensor(tensors, "tokens", shape[1:], path).to(torch.int32, copy=True),
            # A copy: thousands of small mappings of files would cost more than they save.
            _io.take_tensor(tensors, "log_weights", shape, path).clone(),
        )
    except InvalidInputError as error:
        raise InvalidFileError(f"{path} is damaged ({error}). Fit or copy it again.") from error
    return Stored(terms, config)


def _config(header: str, path: Path) -> AttributeConfig:
    try:
        content: dict[str, Any] = json.loads(header)
        version = content.pop("format_version")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidFileError(
            f"{path} is not an attribute. Give a file that `foretrace fit` or Attribute.save wrote."
        ) from None
    if version != FORMAT_VERSION:
        raise InvalidFileError(
            f"{path} has format version {version}, but this foretrace reads {FORMAT_VERSION}. "
            f"Upgrade foretrace, or fit the attribute again."
        )
    known = {entry.name for entry in fields(AttributeConfig)}
    return AttributeConfig(**{key: value for key, value in content.items() if key in known})
