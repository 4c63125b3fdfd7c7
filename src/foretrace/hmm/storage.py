"""Save and load an HMM: `config.json` and `hmm.safetensors`, in a folder or a hub repository."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from torch import Tensor

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidModelError
from foretrace.hmm.emission import DenseEmission, Emission
from foretrace.hmm.inference import Parameters
from foretrace.hmm.sparse import SparseEmission
from foretrace.hmm.transition import DenseTransition, Transition
from foretrace.vocabulary import require_same_fingerprint

FORMAT_VERSION = 1
LAYOUT_KEYS = frozenset(
    {"format_version", "num_states", "vocab_size", "transition", "emission", "save_id"}
)
CONFIG_FILE = "config.json"
TENSOR_FILE = "hmm.safetensors"
TRANSITIONS: dict[str, type[Transition]] = {DenseTransition.kind: DenseTransition}
EMISSIONS: dict[str, type[Emission]] = {
    DenseEmission.kind: DenseEmission,
    SparseEmission.kind: SparseEmission,
}
Operator = TypeVar("Operator", Transition, Emission)


@dataclass(frozen=True)
class HMMConfig:
    """Metadata of an HMM: its origin and the tokenizer it belongs to.

    Attributes:
        eos_token_ids: End-of-text token ids. The last state of the HMM emits them and is absorbing,
            unless it is the only state.
        tokenizer_fingerprint: `foretrace.fingerprint` of the tokenizer's vocabulary.
        source_model: Name of the LM that the HMM was distilled from.
        distillation: Settings and metrics of the distillation: sequences, length, epochs, seed.
            `{"method": "unigram"}` for an HMM of token frequencies alone.
        sparsification: Settings and measured losses of `HMM.sparsify`, if it was applied.

    Example:
        >>> ft.HMMConfig(eos_token_ids=(0,), source_model="my-model").eos_token_ids
        (0,)
    """

    eos_token_ids: tuple[int, ...] = ()
    tokenizer_fingerprint: str | None = None
    source_model: str | None = None
    distillation: Mapping[str, Any] = field(default_factory=dict)
    sparsification: Mapping[str, float] | None = None


def _read_config(content: Mapping[str, Any], where: str) -> HMMConfig:
    """Read the metadata from the content of a `config.json`. Unknown keys raise a warning."""
    version = content.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidFileError(
            f"{where} has format version {version!r}, but this foretrace reads version "
            f"{FORMAT_VERSION}. {_advice(version)}"
        )
    names = {entry.name for entry in fields(HMMConfig)}
    unknown = sorted(set(content) - names - LAYOUT_KEYS)
    if unknown:
        warnings.warn(f"{where}: ignored unknown keys {', '.join(unknown)}", stacklevel=4)
    values = {key: value for key, value in content.items() if key in names}
    for key, value in values.items():
        if not _IS_VALID[key](value):
            raise InvalidFileError(
                f"{where} cannot be read: {key} is {shortened(value)}, which has the wrong type. "
                f"Save it again."
            )
    return HMMConfig(**(values | {"eos_token_ids": tuple(values.get("eos_token_ids", ()))}))


def is_integer(value: object) -> bool:
    """Check that a JSON value is an integer; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "eos_token_ids": lambda value: isinstance(value, list) and all(map(is_integer, value)),
    "tokenizer_fingerprint": _is_text_or_none,
    "source_model": _is_text_or_none,
    "distillation": lambda value: isinstance(value, dict),
    "sparsification": lambda value: value is None or isinstance(value, dict),
}


def _advice(version: object) -> str:
    if isinstance(version, int) and version > FORMAT_VERSION:
        return "Upgrade foretrace: pip install -U foretrace."
    return (
        "If it is a checkpoint of TRACE or Ctrl-G, convert it: foretrace hmm convert SOURCE --out "
        "FOLDER. Otherwise save it again."
    )


class StoredHMM(NamedTuple):
    """The arguments of `HMM`, as they were read from a folder."""

    initial: Tensor
    transition: Transition
    emission: Emission
    config: HMMConfig


def named_tensors(hmm: Parameters) -> dict[str, Tensor]:
    """Return all parameters by their names in the file."""
    named = {"initial": hmm.initial}
    named |= {f"transition.{name}": tensor for name, tensor in hmm.transition.tensors().items()}
    named |= {f"emission.{name}": tensor for name, tensor in hmm.emission.tensors().items()}
    return named


def write(folder: Path, hmm: Parameters, config: HMMConfig) -> None:
    """Write both files atomically, one rename right after the other."""
    save_id = uuid4().hex  # in both files: reveals a pair from different saves at load
    layout = {
        "format_version": FORMAT_VERSION,
        "num_states": len(hmm.initial),
        "vocab_size": hmm.emission.vocab_size,
        "transition": hmm.transition.kind,
        "emission": hmm.emission.kind,
        "save_id": save_id,
    }
    _io.write_tensors_and_json(
        folder / TENSOR_FILE,
        named_tensors(hmm),
        {"save_id": save_id},
        folder / CONFIG_FILE,
        {**layout, **asdict(config)},
    )


def read(
    source: str | os.PathLike[str], revision: str | None, tokenizer_fingerprint: str | None
) -> StoredHMM:
    """Map both files into memory, and check that they belong together."""
    folder = _io.locate(source, revision, [CONFIG_FILE, TENSOR_FILE])
    content = _io.read_json(folder / CONFIG_FILE)
    config = _read_config(content, str(folder / CONFIG_FILE))
    require_same_fingerprint(
        f"The HMM '{source}'", config.tokenizer_fingerprint, tokenizer_fingerprint
    )
    path = folder / TENSOR_FILE
    tensors, metadata = _io.read_tensors(path)
    if metadata.get("save_id") != content.get("save_id"):
        raise InvalidFileError(
            f"{path} and {CONFIG_FILE} come from different saves. Save or download both again."
        )
    _check_shapes(tensors, content, path)
    transition = _operator(TRANSITIONS, "transition", tensors, content, path)
    emission = _operator(EMISSIONS, "emission", tensors, content, path)
    return StoredHMM(tensors["initial"], transition, emission, config)


def _check_shapes(tensors: Mapping[str, Tensor], content: Mapping[str, Any], path: Path) -> None:
    for key in ("num_states", "vocab_size"):
        config_file = path.with_name(CONFIG_FILE)
        if key not in content:
            raise InvalidFileError(f"{config_file} lacks {key}. Save the HMM again.")
        if not is_integer(content[key]):
            raise InvalidFileError(
                f"{config_file}: {key} is {shortened(content[key])}, not an integer. Save the HMM "
                f"again."
            )
    states, vocab = content["num_states"], content["vocab_size"]
    shapes = {
        "initial": (states,),
        "transition.matrix": (states, states),
        "emission.table": (vocab, states),
        "emission.offsets": (vocab + 1,),
        "emission.background": (vocab,),
        "emission.leak": (states,),
    }
    for name in {"initial", *tensors} & shapes.keys():
        _io.take_tensor(tensors, name, shapes[name], path)


def _operator(
    kinds: Mapping[str, type[Operator]],
    role: str,
    tensors: Mapping[str, Tensor],
    content: Mapping[str, Any],
    path: Path,
) -> Operator:
    """Build the transition or the emission from the tensors whose names begin with `role`."""
    kind = str(content.get(role))
    if kind not in kinds:
        raise InvalidFileError(
            f"{path}: {role} is '{kind}', but this foretrace knows {', '.join(kinds)}. "
            f"Upgrade foretrace, or save the HMM in one of these forms."
        )
    role_tensors = {
        name.removeprefix(f"{role}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{role}.")
    }
    try:
        return kinds[kind].from_tensors(role_tensors)
    except InvalidModelError as error:
        raise InvalidFileError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise InvalidFileError(
            f"{path}: a {kind} {role} cannot be made of {', '.join(role_tensors) or 'nothing'} "
            f"({error}). Save or download it again."
        ) from error
