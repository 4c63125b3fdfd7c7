"""Save and load an HMM: `config.json` and `hmm.safetensors`, in a folder or a hub repository."""

import os
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from torch import Tensor

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidModelError
from foretrace.hmm.config import FORMAT_VERSION, HMMConfig, is_integer
from foretrace.hmm.emission import DenseEmission, Emission
from foretrace.hmm.inference import Parameters
from foretrace.hmm.sparse import SparseEmission
from foretrace.hmm.transition import DenseTransition, Transition
from foretrace.vocabulary import require_same_fingerprint

CONFIG_FILE = "config.json"
TENSOR_FILE = "hmm.safetensors"
TRANSITIONS: dict[str, type[Transition]] = {DenseTransition.kind: DenseTransition}
EMISSIONS: dict[str, type[Emission]] = {
    DenseEmission.kind: DenseEmission,
    SparseEmission.kind: SparseEmission,
}
Operator = TypeVar("Operator", Transition, Emission)


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
        {**layout, **config.to_json()},
    )


def read(
    source: str | os.PathLike[str], revision: str | None, tokenizer_fingerprint: str | None
) -> StoredHMM:
    """Map both files into memory, and check that they belong together."""
    folder = _io.locate(source, revision, [CONFIG_FILE, TENSOR_FILE])
    content = _io.read_json(folder / CONFIG_FILE)
    config = HMMConfig.from_json(content, str(folder / CONFIG_FILE))
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
