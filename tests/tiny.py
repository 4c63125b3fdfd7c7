"""Tiny HMMs, and reference results by enumeration of all state paths and sequences."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from foretrace.hmm import HMM, SparseEmission
from foretrace.hmm.inference import Parameters

STATES, TOKENS, LENGTH = 3, 4, 5


@dataclass(frozen=True, eq=False)
class KroneckerTransition:
    """A structured transition, the Kronecker product of two matrices."""

    kind: ClassVar[str] = "kronecker (test double)"
    left: Tensor  # (a, a)
    right: Tensor  # (b, b)

    @property
    def num_states(self) -> int:
        return len(self.left) * len(self.right)

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def predict(self, belief: Tensor) -> Tensor:
        grid = belief.reshape(*belief.shape[:-1], len(self.left), len(self.right))
        return (self.left.T @ grid @ self.right).reshape(belief.shape)

    def expect(self, values: Tensor) -> Tensor:
        grid = values.reshape(*values.shape[:-1], len(self.left), len(self.right))
        return (self.left @ grid @ self.right.T).reshape(values.shape)

    def tensors(self) -> dict[str, Tensor]:
        return {"left": self.left, "right": self.right}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(**tensors)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        return type(self)(self.left.to(device, dtype), self.right.to(device, dtype))


def simplex(*shape: int, seed: int, dim: int = -1) -> Tensor:
    """Draw random distributions along `dim`, in float64."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(shape, dtype=torch.float64).exponential_(generator=generator)
    return drawn / drawn.sum(dim, keepdim=True)


def sparse_emission(
    vocab: int, states: int, *, share: float = 0.4, seed: int = 0
) -> SparseEmission:
    """Draw a sparse emission with a background; about `share` of the entries are stored."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(vocab, states, generator=generator) < share
    kept[0] = True  # every state has an entry
    leak = torch.rand(states, generator=generator, dtype=torch.float64) * 0.5
    table = simplex(vocab, states, seed=seed, dim=0) * kept
    table = table / table.sum(0) * (1 - leak)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), kept.sum(1).cumsum(0)])
    background = simplex(vocab, seed=seed + 1)
    return SparseEmission(offsets, kept.nonzero()[:, 1], table[kept], background, leak)


def tiny_hmm(form: str, seed: int = 0) -> HMM:
    """Build a float64 HMM with 3 states (4 for a structured transition) and 4 tokens."""
    if form == "structured":
        factors = simplex(2, 2, seed=seed), simplex(2, 2, seed=seed + 1)
        emission = simplex(TOKENS, 4, seed=seed + 2, dim=0)
        return HMM(simplex(4, seed=seed + 3), KroneckerTransition(*factors), emission)
    if form == "sparse":
        emission_operator = sparse_emission(TOKENS, STATES, seed=seed)
        transition = simplex(STATES, STATES, seed=seed)
        return HMM(simplex(STATES, seed=seed + 1), transition, emission_operator)
    ends: dict[str, tuple[int, ...]] = {"eos": (2,), "two ends": (2, 0)}
    eos = ends.get(form)
    return HMM.random(STATES, TOKENS, eos_token_id=eos, seed=seed, dtype=torch.float64)


FORMS = ("dense", "sparse", "eos", "structured")


def all_texts(length: int) -> Tensor:
    """List all sequences of `length` tokens: (TOKENS ** length, length)."""
    return torch.tensor(list(itertools.product(range(TOKENS), repeat=length)))


def dense_tables(hmm: Parameters) -> tuple[Tensor, Tensor, Tensor]:
    """Return an HMM's dense tables: initial (h,), transition (h, h), emission (V, h)."""
    identity = torch.eye(len(hmm.initial), dtype=torch.float64)
    emission = hmm.emission.of_tokens(torch.arange(hmm.emission.vocab_size))
    return hmm.initial, hmm.transition.predict(identity), emission


def path_probabilities(hmm: Parameters, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return all state paths, (P, T), and p(path, sequence), (P, N): eq. (hmm_defn)."""
    initial, transition, emission = dense_tables(hmm)
    paths = torch.tensor(list(itertools.product(range(len(initial)), repeat=tokens.shape[1])))
    joint = torch.ones(len(paths), len(tokens), dtype=torch.float64)
    for t in range(tokens.shape[1]):
        prior = initial[paths[:, 0]] if t == 0 else transition[paths[:, t - 1], paths[:, t]]
        joint *= prior[:, None] * emission[tokens[:, t]][:, paths[:, t]].T
    return paths, joint


def state_marginals(hmm: Parameters, tokens: Tensor, position: int) -> Tensor:
    """Sum p(path, sequence) over the paths with each state at `position`: (N, h)."""
    paths, joint = path_probabilities(hmm, tokens)
    at_position = torch.nn.functional.one_hot(paths[:, position], len(hmm.initial)).double()
    return joint.T @ at_position
