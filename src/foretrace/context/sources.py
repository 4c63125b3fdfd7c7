"""Read the head of an LM from its files, without the rest of the LM."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretrace import _io
from foretrace.context.head import Head, logit_transform, special_ids, unsuitable_tokens
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.gguf import is_gguf

if TYPE_CHECKING:
    from gguf import GGUFReader

CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embeddings.weight",
)
GGUF_HEADS = ("output.weight", "token_embd.weight")
GGUF_DIVIDES = ("granite", "minicpm")  # architectures whose `logit_scale` is a divisor
GGUF_NORMAL = 1  # the type of tokens that are neither special, added, unused nor bytes


def read_head(source: str | os.PathLike[str]) -> Head:
    """Read the head of an LM from its files: one matrix, also if the LM has many files.

    Args:
        source: A folder with safetensors files, a hub id, or a GGUF file, whose head is
            dequantised.

    Returns:
        The head, and the tokens that a probe must not use.

    Raises:
        InvalidFileError: The files have no head that can be read.

    Example:
        >>> from foretrace.context import read_head
        >>> head = read_head("SmolLM2-135M-Instruct")  # doctest: +SKIP
    """
    if is_gguf(os.fspath(source)):
        return _from_gguf(Path(source))
    folder = _io.locate(source, None, [CONFIG, TOKENIZER, INDEX])
    config = _io.read_json(folder / CONFIG)
    files = _files(folder, source)
    text = {**config, **(config.get("text_config") or {})}
    name = _head_name(list(files), bool(text.get("tie_word_embeddings")), folder)
    bias_name = name.removesuffix("weight") + "bias"
    weight = _read_tensor(folder, source, files[name], name)
    bias = None
    if bias_name in files and name.endswith(HEADS):
        bias = _read_tensor(folder, source, files[bias_name], bias_name)
    scale, softcap = logit_transform(config)
    return Head(weight, bias, scale, softcap, _excluded(folder, config))


def _files(folder: Path, source: str | os.PathLike[str]) -> dict[str, str]:
    """Return the file of every tensor, by the tensor's name."""
    if (folder / INDEX).is_file():
        return dict(_io.read_json(folder / INDEX).get("weight_map", {}))
    folder = _io.locate(source, None, [SINGLE])
    return dict.fromkeys(_io.tensor_names(folder / SINGLE), SINGLE)


def _head_name(names: Sequence[str], tied: bool, folder: Path) -> str:
    heads = [name for name in names if name.endswith(HEADS)]
    embeddings = [name for name in names if name.endswith(EMBEDDINGS)]
    found = embeddings or heads if tied else heads or embeddings
    packed = not tied and not heads and any("lm_head." in name for name in names)
    if packed or not found:
        raise InvalidFileError(
            f"{folder} has no matrix that makes logits: a tensor named {' or '.join(HEADS)}, or "
            f"the embeddings. Pass an LM whose head is not quantised, or a GGUF file."
        )
    return min(found, key=len)  # other parts of the LM have longer names


def _read_tensor(folder: Path, source: str | os.PathLike[str], file: str, name: str) -> Tensor:
    if not (folder / file).is_file():
        folder = _io.locate(source, None, [file])
    return _io.read_tensors(folder / file, [name])[0][name]


def _excluded(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that a probe must not use, by the files of the tokenizer."""
    content = _io.read_json(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of (token, score), as Unigram has them
        vocabulary = {entry[0]: token for token, entry in enumerate(vocabulary)}
    added = {token["id"] for token in content.get("added_tokens", [])}
    return unsuitable_tokens(vocabulary, added | special_ids(config))


def _from_gguf(file: Path) -> Head:
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise InvalidInputError(
            "Reading the head of a GGUF file needs gguf: pip install gguf."
        ) from None
    if not file.is_file():
        raise InvalidFileError(f"There is no file {file}. Pass the path of a GGUF model.")
    try:
        reader = GGUFReader(file)
    except (ValueError, OSError) as error:
        raise InvalidFileError(f"{file} is not a GGUF file ({error}). Copy it again.") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    name = next((name for name in GGUF_HEADS if name in tensors), None)
    if name is None:
        raise InvalidFileError(f"{file} has none of the tensors {', '.join(GGUF_HEADS)}.")
    read = {
        key: torch.from_numpy(dequantize(tensors[key].data, tensors[key].tensor_type))
        for key in (name, "output.bias")
        if key in tensors
    }
    architecture = str(_field(reader, "general.architecture"))
    scale = float(_field(reader, f"{architecture}.logit_scale") or 1.0)
    scale = 1 / scale if architecture.startswith(GGUF_DIVIDES) else scale
    softcap = _field(reader, f"{architecture}.final_logit_softcapping")
    return Head(read[name], read.get("output.bias"), scale, softcap, _gguf_excluded(reader))


def _gguf_excluded(reader: "GGUFReader") -> frozenset[int]:
    tokens = _field(reader, "tokenizer.ggml.tokens") or []
    kinds = _field(reader, "tokenizer.ggml.token_type") or []
    special = {token for token, kind in enumerate(kinds) if kind != GGUF_NORMAL}
    return unsuitable_tokens({text: token for token, text in enumerate(tokens)}, special)


def _field(reader: "GGUFReader", name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()
