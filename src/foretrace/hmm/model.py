"""The hidden Markov model: three frozen parts, and what one does with them."""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidInputError, InvalidModelError
from foretrace.hmm import inference, storage
from foretrace.hmm.config import HMMConfig
from foretrace.hmm.emission import DenseEmission, Emission
from foretrace.hmm.inference import Filtered
from foretrace.hmm.probability import distribution_totals, dtype_name, working_dtype
from foretrace.hmm.sparsify import sparsify
from foretrace.hmm.transition import DenseTransition, Transition


@dataclass(frozen=True, eq=False, init=False, repr=False)
class HMM:
    """A hidden Markov model over tokens, frozen: threads and requests share one.

    `initial` is p(z_1), (h,); `transition` p(z' | z) and `emission` p(x | z) are operators. Tensors
    are taken as dense: transition (h, h) with `transition[z, z']`, emission (V, h) with
    `emission[x, z]`, token-major.
    """

    initial: Tensor
    transition: Transition
    emission: Emission
    config: HMMConfig

    def __init__(
        self,
        initial: Tensor,
        transition: Tensor | Transition,
        emission: Tensor | Emission,
        config: HMMConfig | None = None,
    ) -> None:
        parts = {"initial": initial, "transition": transition, "emission": emission}
        for name, part in parts.items():
            if not isinstance(part, Tensor | Transition | Emission):
                raise InvalidInputError(
                    f"{name} is of type {type(part).__name__}. Give a torch tensor; "
                    f"torch.from_numpy makes one of an array."
                )
        if initial.dim() != 1:
            raise InvalidModelError(
                f"initial has the shape {tuple(initial.shape)}, but must be (states,)."
            )
        config = config or HMMConfig()
        moves = DenseTransition(transition) if isinstance(transition, Tensor) else transition
        speaks = DenseEmission(emission) if isinstance(emission, Tensor) else emission
        work = torch.promote_types(working_dtype(moves.dtype), working_dtype(speaks.dtype))
        total = distribution_totals("initial", initial[None], dim=1)
        states = {len(initial), moves.num_states, speaks.num_states}
        if len(states) != 1:
            raise InvalidModelError(
                f"initial has {len(initial)} states, transition {moves.num_states} and emission "
                f"{speaks.num_states}; all three must agree. emission is token-major: (V, h)."
            )
        bad = [token for token in config.eos_token_ids if not 0 <= token < speaks.vocab_size]
        if bad:
            raise InvalidModelError(
                f"eos_token_ids names {bad}, but the vocabulary ends at {speaks.vocab_size - 1}."
            )
        object.__setattr__(self, "initial", _normalised(initial, total).to(work))
        object.__setattr__(self, "transition", moves)
        object.__setattr__(self, "emission", speaks)
        object.__setattr__(self, "config", config)

    @classmethod
    def random(
        cls,
        num_states: int,
        vocab_size: int,
        *,
        eos_token_id: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Draw every distribution uniformly; `eos_token_id` is what the last state alone says."""
        if eos_token_id is not None and not 0 <= eos_token_id < vocab_size:
            raise InvalidInputError(
                f"eos_token_id is {eos_token_id}, but the vocabulary ends at {vocab_size - 1}."
            )
        generator = torch.Generator(device).manual_seed(seed)
        work = working_dtype(dtype)

        def draw(*shape: int, dim: int) -> Tensor:
            table = torch.empty(shape, dtype=work, device=device).exponential_(generator=generator)
            return table.div_(table.sum(dim, keepdim=True))

        initial = draw(num_states, dim=0)
        transition = draw(num_states, num_states, dim=1)
        emission = draw(vocab_size, num_states, dim=0)
        if eos_token_id is not None:
            transition[-1], emission[:, -1], emission[eos_token_id] = 0, 0, 0
            transition[-1, -1] = emission[eos_token_id, -1] = 1
            emission /= emission.sum(0)
        config = HMMConfig(eos_token_ids=() if eos_token_id is None else (eos_token_id,))
        return cls(initial, transition.to(dtype), emission.to(dtype), config)

    @property
    def num_states(self) -> int:
        """h, the number of hidden states."""
        return self.initial.numel()

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.emission.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the emission is stored in."""
        return self.emission.dtype

    @property
    def device(self) -> torch.device:
        """Device that the tables are on."""
        return self.initial.device

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters as they are stored."""
        return sum(tensor.nbytes for tensor in storage.named_tensors(self).values())

    def identity(self) -> str:
        """Name it by its numbers: two HMMs of one name are the same."""
        tables = {**self.transition.tensors(), **self.emission.tensors()}
        return _io.checksums([self.initial, *(tables[name] for name in sorted(tables))])

    def __repr__(self) -> str:
        return (
            f"HMM({self.num_states} states, {self.vocab_size} tokens, {self.transition.kind} "
            f"transition, {self.emission.kind} emission, {dtype_name(self.dtype)}, "
            f"{self.device})"
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "HMM":
        """Move or convert the tables. Beliefs are float32 at least, whatever the tables are."""
        return HMM(
            self.initial.to(device),
            self.transition.to(device, dtype),
            self.emission.to(device, dtype),
            self.config,
        )

    def sparsify(self, tolerance: float = 1e-3) -> "HMM":
        """Give the same HMM with sparse + background emission.

        Text drawn from the HMM loses at most `tolerance` nats of log-likelihood per token;
        `config.sparsification` says what the worst state really lost.
        """
        if not isinstance(self.emission, DenseEmission):
            raise InvalidInputError(
                f"The emission is {self.emission.kind} already. Sparsify the dense HMM it came "
                f"from: losses would add up unseen."
            )
        emission, cost = sparsify(self.emission, tolerance)
        config = replace(self.config, sparsification=asdict(cost))
        return HMM(self.initial, self.transition, emission, config)

    def log_likelihood(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Give log p(x) of every row, in nats: (batch, length) ids -> (batch,).

        `mask` is True where there is a token; padding, on either side, does not count. A token
        that no reachable state emits counts as log(1e-30): see `foretrace.hmm.inference`.
        """
        return inference.log_likelihood(self, *self._admit(tokens, mask))

    def filter(self, tokens: Tensor, mask: Tensor | None = None) -> Filtered:
        """Give belief, predicted and log_probability at every position: (batch, length, ...)."""
        return inference.filter(self, *self._admit(tokens, mask))

    def smooth(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Give p(z_t | the whole row): (batch, length) ids -> (batch, length, h)."""
        return inference.smooth(self, *self._admit(tokens, mask))

    def sample(self, count: int, length: int, seed: int | None = None) -> Tensor:
        """Draw `count` sequences of `length` tokens: (count, length)."""
        if count < 1 or length < 1:
            raise InvalidInputError(f"Cannot draw {count} sequences of {length}: give at least 1.")
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        return inference.sample(self, count, length, generator).tokens

    def _admit(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Check what a caller gave; masked positions may hold anything."""
        tokens = torch.as_tensor(tokens)
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.is_floating_point():
            raise InvalidInputError(
                f"tokens must be ids of shape (batch, length), at least 1 by 1, but are "
                f"{dtype_name(tokens.dtype)} of shape {tuple(tokens.shape)}."
            )
        tokens = tokens.to(self.device, torch.long)
        if mask is not None:
            if mask.shape != tokens.shape:
                raise InvalidInputError(
                    f"mask has shape {tuple(mask.shape)}, but must have that of the tokens, "
                    f"{tuple(tokens.shape)}."
                )
            mask = mask.to(self.device, torch.bool)
            tokens = tokens.masked_fill(~mask, 0)
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.vocab_size:
            raise InvalidInputError(
                f"Token ids run from {low} to {high}, but the vocabulary from 0 to "
                f"{self.vocab_size - 1}. Is this the tokenizer that the HMM was made with? If they "
                f"are padding, mask them."
            )
        return tokens, mask

    def save_pretrained(
        self, folder: str | os.PathLike[str], dtype: torch.dtype | None = None
    ) -> None:
        """Write `config.json` and `hmm.safetensors`; `dtype` converts the tables on the way."""
        storage.write(Path(folder), self if dtype is None else self.to(dtype=dtype), self.config)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> Self:
        """Load a local folder or a repository of the hub, mapped into memory, not copied.

        Give the tokenizer's `fingerprint` to be sure that it is the one the HMM was made with.
        """
        stored = storage.read(source, revision, tokenizer_fingerprint)
        try:
            return cls(*stored)
        except InvalidModelError as error:
            raise InvalidFileError(f"{source}: {error}") from error


def _normalised(initial: Tensor, total: Tensor) -> Tensor:
    """Divide by the total, unless that would only stir the last bits: saving must be exact."""
    return initial if float((total - 1).abs()) < 1e-6 else initial / total
