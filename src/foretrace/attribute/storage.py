"""Read and write attributes: one safetensors file, with the config in its header."""

import hashlib
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrace import _io
from foretrace.attribute.automaton import DFA, WeightedAutomaton
from foretrace.attribute.config import AttributeConfig
from foretrace.attribute.context import ContextReward
from foretrace.attribute.evidence import Evidence
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidFileError, InvalidInputError

# Version 2 adds the automaton, version 3 evidence, version 4 the context reward and rewards of all
# tokens. A reader of an earlier version would ignore them, and must refuse the file.
PLAIN, WITH_AUTOMATON, WITH_EVIDENCE, WITH_CONTEXT = VERSIONS = 1, 2, 3, 4
HEADER_KEY, CONTEXT_KEY = "foretrace_attribute", "context_fingerprint"
MIN_DENSE = 4096  # tokens with a reward
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Stored(NamedTuple):
    """The content of a file."""

    terms: Terms
    config: AttributeConfig
    evidence: tuple[Evidence, ...] = ()
    context: ContextReward | None = None


def write(path: Path, stored: Stored) -> None:
    """Write the file atomically."""
    version = PLAIN if stored.terms.automaton is None else WITH_AUTOMATON
    version = WITH_EVIDENCE if stored.evidence else version
    version = WITH_CONTEXT if any(map(_is_dense, stored.evidence)) else version
    header = {"format_version": version, **vars(stored.config)}
    if stored.context is not None:
        header |= {"format_version": WITH_CONTEXT, CONTEXT_KEY: stored.context.fingerprint}
    _io.write_tensors(path, _tensors(stored), {HEADER_KEY: _io.to_json(path, header)})


def checksum(stored: Stored) -> str:
    """Return the SHA-256 of the tensors and of the context reward's LM; the config does not count.

    Numbers are hashed as float64 or int64, so that only their values count and not their types.
    """
    digest = hashlib.sha256(b"" if stored.context is None else stored.context.fingerprint.encode())
    for name, tensor in sorted(_tensors(stored).items()):
        wide = tensor.double() if tensor.is_floating_point() else tensor.long()
        values = (wide + 0).numpy()  # -0.0 becomes 0.0
        digest.update(f"{name} {values.shape} ".encode())
        digest.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def _tensors(stored: Stored) -> dict[str, Tensor]:
    """Return the tensors of the file, by name."""
    terms, _, evidence, context = stored
    tensors = {
        "coefficients": terms.coefficients,
        "tokens": terms.tokens,
        "log_weights": terms.log_weights,
    }
    if terms.automaton is not None:
        dfa = terms.automaton.dfa
        tensors |= {
            "automaton_tokens": dfa.tokens,
            "automaton_classes": dfa.classes,
            "automaton_moves": dfa.transitions,
            "finals": terms.automaton.final_weights,
        }
    if evidence:
        listed = [one for one in evidence if not _is_dense(one)]
        tensors |= {
            "evidence_bias": torch.tensor([one.bias for one in evidence], dtype=torch.float64),
            "evidence_once": torch.tensor([one.first_only for one in evidence], dtype=torch.uint8),
            "evidence_sizes": torch.tensor([len(one.tokens) for one in evidence]),
            "evidence_tokens": torch.cat([torch.zeros(0).int(), *(one.tokens for one in listed)]),
            "evidence_rewards": torch.cat([torch.zeros(0), *(one.rewards for one in listed)]),
        }
        for number, one in enumerate(evidence):
            if _is_dense(one):
                tensors[f"evidence_{number}_dense"] = one.dense(int(one.tokens[-1]) + 1).half()
    if context is not None:
        tensors |= {"context_readers": context.readers, "context_writers": context.writers}
    return tensors


def _is_dense(evidence: Evidence) -> bool:
    """Return whether the rewards of all tokens, in float16, take less space than a list."""
    tokens, rewards = evidence.tokens, evidence.rewards
    if len(tokens) < MIN_DENSE or 3 * len(tokens) < int(tokens[-1]):
        return False
    return bool((rewards.half() == rewards).all() & (rewards != 0).all())


def read(path: Path) -> Stored:
    """Read and check a file that `write` wrote."""
    if not path.is_file():
        raise InvalidFileError(
            f"There is no file {path}. Pass a file that `foretrace fit` or Attribute.save wrote."
        )
    tensors, metadata = _io.read_tensors(path)
    version, config, fingerprint = _read_header(metadata.get(HEADER_KEY, ""), path)
    none = torch.zeros(0)
    shape = tensors.get("coefficients", none).numel(), tensors.get("tokens", none).numel()
    has_automaton = version == WITH_AUTOMATON or "automaton_tokens" in tensors
    try:
        terms = Terms(
            _floats(tensors, "coefficients", shape[:1], path).to(torch.float64, copy=True),
            _integers(tensors, "tokens", shape[1:], path),
            # A copy: thousands of small memory-mapped files would cost more than they save.
            _floats(tensors, "log_weights", shape, path).clone(),
            _automaton(tensors, shape[0], path) if has_automaton else None,
        )
        terms.check_probability()
        has_evidence = version == WITH_EVIDENCE or "evidence_bias" in tensors
        evidence = _evidence(tensors, path) if has_evidence else ()
        has_context = "context_writers" in tensors or fingerprint is not None
        context = _context(tensors, fingerprint, path) if has_context else None
    except InvalidInputError as error:
        raise _damaged(path, error) from error
    return Stored(terms, config, evidence, context)


def _context(tensors: dict[str, Tensor], fingerprint: Any, path: Path) -> ContextReward:
    rank, width = (*tensors.get("context_writers", torch.zeros(0)).shape, 0, 0)[:2]
    readers = _floats(tensors, "context_readers", (rank, width + 1), path).clone()
    writers = _floats(tensors, "context_writers", (rank, width), path).clone()
    return ContextReward(readers, writers, fingerprint)


def _evidence(tensors: dict[str, Tensor], path: Path) -> tuple[Evidence, ...]:
    none = torch.zeros(0)
    count = tensors.get("evidence_bias", none).numel()
    total = tensors.get("evidence_tokens", none).numel()
    bias = _floats(tensors, "evidence_bias", (count,), path).tolist()
    first_only = _integers(tensors, "evidence_once", (count,), path).tolist()
    sizes = _integers(tensors, "evidence_sizes", (count,), path).tolist()
    tokens = _integers(tensors, "evidence_tokens", (total,), path)
    rewards = _floats(tensors, "evidence_rewards", (total,), path).clone()
    dense = [tensors.get(f"evidence_{number}_dense") for number in range(count)]
    listed = [0 if one is not None else size for one, size in zip(dense, sizes, strict=True)]
    if min(sizes, default=0) < 0 or sum(listed) != total:
        raise _damaged(path, "the sizes of evidence do not add up to its tokens")
    parts = zip(torch.split(tokens, listed), torch.split(rewards, listed), strict=True)
    evidence = []
    for number, (ids, values) in enumerate(parts):
        if dense[number] is not None:
            name = f"evidence_{number}_dense"
            row = _floats(tensors, name, tuple(tensors[name].shape), path)
            ids = row.nonzero()[:, 0].int()
            values = row[ids].float()
        evidence.append(Evidence(bias[number], ids, values, bool(first_only[number])))
    return tuple(evidence)


def _automaton(tensors: dict[str, Tensor], num_terms: int, path: Path) -> WeightedAutomaton:
    none = torch.zeros(0)
    count = tensors.get("automaton_tokens", none).numel()
    table_shape = tuple(tensors.get("automaton_moves", none).shape)
    tokens = _integers(tensors, "automaton_tokens", (count,), path)
    classes = _integers(tensors, "automaton_classes", (count,), path)
    transitions = _integers(tensors, "automaton_moves", table_shape, path)
    final_weights = _floats(tensors, "finals", (num_terms, *table_shape[:1]), path)
    dfa = DFA(tokens, classes, transitions)
    return WeightedAutomaton(dfa, final_weights.to(torch.float64, copy=True))


def _floats(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    """Return a tensor of the file; check its shape and that its type is floating-point."""
    tensor = _io.take_tensor(tensors, name, shape, path)
    if tensor.dtype not in FLOATS:
        raise _wrong_type(path, name, tensor, "float16, bfloat16, float32 or float64")
    return tensor


def _integers(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    """Return a copy of a tensor of the file as int32; check its shape, type and range."""
    tensor = _io.take_tensor(tensors, name, shape, path)
    if tensor.dtype not in INTEGERS:
        raise _wrong_type(path, name, tensor, "an integer type")
    narrow = tensor.to(torch.int32, copy=True)
    if not torch.equal(narrow.long(), tensor.long()):
        raise _damaged(path, f"tensor '{name}' has numbers outside the range of int32")
    return narrow


def _wrong_type(path: Path, name: str, tensor: Tensor, expected: str) -> InvalidFileError:
    return InvalidFileError(
        f"{path}: tensor '{name}' has type {str(tensor.dtype).removeprefix('torch.')}, but "
        f"{expected} was expected. Fit or copy it again."
    )


def _damaged(path: Path, problem: InvalidInputError | str) -> InvalidFileError:
    return InvalidFileError(f"{path} is damaged ({problem}). Fit or copy it again.")


def _read_header(header: str, path: Path) -> tuple[int, AttributeConfig, Any]:
    """Return the format version, the config, and the LM of a context reward."""
    version, content = _io.parse_header(
        header,
        f"{path} is not an attribute. Pass a file that `foretrace fit` or Attribute.save wrote.",
    )
    if version not in VERSIONS:
        shown = version if isinstance(version, int) else f"of type {type(version).__name__}"
        raise InvalidFileError(
            f"{path} has format version {shown}, but this foretrace reads versions up to "
            f"{VERSIONS[-1]}. Upgrade foretrace, or fit the attribute again."
        )
    field_names = {entry.name for entry in fields(AttributeConfig)}
    try:
        config = AttributeConfig(**{k: v for k, v in content.items() if k in field_names})
    except InvalidInputError as error:
        raise _damaged(path, error) from error
    return version, config, content.get(CONTEXT_KEY)
