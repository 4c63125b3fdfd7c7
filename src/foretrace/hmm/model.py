"""The hidden Markov model."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from foretrace import _io, _remote
from foretrace.errors import InvalidFileError, InvalidInputError, InvalidModelError
from foretrace.hmm import inference, storage
from foretrace.hmm.emission import DenseEmission, Emission
from foretrace.hmm.inference import Filtered
from foretrace.hmm.probability import (
    distribution_totals,
    dtype_name,
    emit_only_ends_,
    working_dtype,
)
from foretrace.hmm.sparsify import sparsify
from foretrace.hmm.storage import HMMConfig
from foretrace.hmm.transition import DenseTransition, Transition

MIN_FREQUENCY = 1e-9  # of a token in a unigram HMM: no token is impossible


@dataclass(frozen=True, eq=False, init=False, repr=False)
class HMM:
    """A hidden Markov model over token ids.

    It is immutable: threads and requests can share one.

    Args:
        initial: p(z_1), (h,).
        transition: p(z' | z): a dense (h, h) tensor, `transition[z, z']`, or a `Transition`.
        emission: p(x | z): a dense (V, h) tensor, `emission[x, z]`, or an `Emission`.
        config: Metadata.

    Attributes:
        initial: p(z_1), (h,).
        transition: p(z' | z) as an operator.
        emission: p(x | z) as an operator.
        config: Metadata.

    Raises:
        InvalidInputError: An argument is neither a tensor nor an operator.
        InvalidModelError: Shapes do not match, or a table does not hold distributions.

    Example:
        >>> ft.HMM(
        ...     initial=torch.tensor([0.5, 0.5]),
        ...     transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]]),
        ...     emission=torch.tensor([[0.7, 0.0], [0.3, 0.4], [0.0, 0.6]]),
        ... )
        HMM(2 states, 3 tokens, dense transition, dense emission, float32, cpu)
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
        arguments = {"initial": initial, "transition": transition, "emission": emission}
        for name, argument in arguments.items():
            if not isinstance(argument, Tensor | Transition | Emission):
                raise InvalidInputError(
                    f"{name} has type {type(argument).__name__}. Pass a torch tensor; "
                    f"torch.from_numpy converts an array."
                )
        if initial.dim() != 1:
            raise InvalidModelError(
                f"initial has the shape {tuple(initial.shape)}, but must be (states,)."
            )
        config = config or HMMConfig()
        if isinstance(transition, Tensor):
            transition = DenseTransition(transition)
        if isinstance(emission, Tensor):
            emission = DenseEmission(emission)
        work = torch.promote_types(working_dtype(transition.dtype), working_dtype(emission.dtype))
        total = distribution_totals("initial", initial[None], dim=1)
        if not len(initial) == transition.num_states == emission.num_states:
            raise InvalidModelError(
                f"initial has {len(initial)} states, transition {transition.num_states} and "
                f"emission {emission.num_states}; all three must agree. emission is token-major: "
                f"(V, h)."
            )
        outside = [token for token in config.eos_token_ids if not 0 <= token < emission.vocab_size]
        if outside:
            raise InvalidModelError(
                f"eos_token_ids has {outside}, but the vocabulary ends at "
                f"{emission.vocab_size - 1}."
            )
        object.__setattr__(self, "initial", _normalised(initial, total).to(work))
        object.__setattr__(self, "transition", transition)
        object.__setattr__(self, "emission", emission)
        object.__setattr__(self, "config", config)

    @classmethod
    def random(
        cls,
        num_states: int,
        vocab_size: int,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Build an HMM whose distributions are drawn uniformly from the simplex.

        Args:
            num_states: Number of hidden states, h.
            vocab_size: Number of token ids, V.
            eos_token_id: End-of-text token, or several, of which the first is the usual one. The
                last state is then absorbing, and it alone emits them. None for no end-of-text
                token.
            seed: Seed of the random numbers.
            dtype: Dtype of the tables.
            device: Device of the tables.

        Returns:
            A dense HMM.

        Raises:
            InvalidInputError: `eos_token_id` is outside the vocabulary.

        Example:
            >>> ft.HMM.random(8, 20, eos_token_id=0, seed=1)
            HMM(8 states, 20 tokens, dense transition, dense emission, float32, cpu)
        """
        ends = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
        if outside := [token for token in ends if not 0 <= token < vocab_size]:
            raise InvalidInputError(
                f"eos_token_id is {outside[0]}, but the vocabulary ends at {vocab_size - 1}."
            )
        generator = torch.Generator(device).manual_seed(seed)
        work = working_dtype(dtype)

        def draw(*shape: int, dim: int) -> Tensor:
            table = torch.empty(shape, dtype=work, device=device).exponential_(generator=generator)
            return table.div_(table.sum(dim, keepdim=True))

        initial = draw(num_states, dim=0)
        transition = draw(num_states, num_states, dim=1)
        emission = draw(vocab_size, num_states, dim=0)
        if ends:
            transition[-1] = 0
            transition[-1, -1] = 1
            emission = emit_only_ends_(emission, ends)
            emission /= emission.sum(0)
        config = HMMConfig(eos_token_ids=ends)
        return cls(initial, transition.to(dtype), emission.to(dtype), config)

    @classmethod
    def unigram(
        cls,
        frequencies: Tensor,
        *,
        eos_token_ids: Sequence[int] = (),
        tokenizer_fingerprint: str | None = None,
        source_model: str | None = None,
    ) -> Self:
        """Build an HMM with one state, which emits every token at its frequency.

        What follows a token does not depend on it, so that goals weigh the next token alone. A
        required text is placed by the frequencies of its tokens.

        Args:
            frequencies: How often the LM writes each token, (V,). They need not sum to 1. Tokens
                below a billionth of the sum count as that.
            eos_token_ids: End-of-text tokens, of which the first is the usual one.
            tokenizer_fingerprint: `foretrace.fingerprint` of the tokenizer's vocabulary.
            source_model: Name of the LM.

        Returns:
            The HMM. Its `config.distillation` says `{"method": "unigram"}`.

        Raises:
            InvalidModelError: The frequencies are no vector of numbers from 0, or all are 0.

        Example:
            >>> ft.HMM.unigram(torch.ones(20), eos_token_ids=[0])
            HMM(1 state, 20 tokens, dense transition, dense emission, float32, cpu)
        """
        values = frequencies.double()
        if values.dim() != 1 or not bool((values >= 0).all()) or not 0 < values.sum() < torch.inf:
            raise InvalidModelError(
                f"Frequencies must be a vector of numbers from 0, not all 0, but have the shape "
                f"{tuple(values.shape)} and the sum {float(values.sum()):g}."
            )
        values = (values / values.sum()).clamp_min(MIN_FREQUENCY)
        one = torch.ones(1, device=values.device)
        config = HMMConfig(
            tuple(eos_token_ids), tokenizer_fingerprint, source_model, {"method": "unigram"}
        )
        return cls(one, one[None], (values / values.sum()).float()[:, None], config)

    @property
    def num_states(self) -> int:
        """Number of hidden states, h."""
        return self.initial.numel()

    @property
    def is_unigram(self) -> bool:
        """Whether there is one state: what follows does not depend on the tokens before."""
        return self.num_states == 1

    @property
    def vocab_size(self) -> int:
        """Number of token ids, V."""
        return self.emission.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored emission."""
        return self.emission.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self.initial.device

    @property
    def nbytes(self) -> int:
        """Size of the parameters in bytes, as they are saved."""
        return sum(tensor.nbytes for tensor in storage.named_tensors(self).values())

    @cached_property
    def checksum(self) -> str:
        """A checksum of the parameters: HMMs with equal tables have the same one.

        It is computed when it is first read.

        Example:
            >>> ft.HMM.random(4, 9, seed=1).checksum == ft.HMM.random(4, 9, seed=1).checksum
            True
        """
        tables = {**self.transition.tensors(), **self.emission.tensors()}
        return _io.checksums([self.initial, *(tables[name] for name in sorted(tables))])

    def __repr__(self) -> str:
        states = "1 state" if self.num_states == 1 else f"{self.num_states} states"
        return (
            f"HMM({states}, {self.vocab_size} tokens, {self.transition.kind} transition, "
            f"{self.emission.kind} emission, {dtype_name(self.dtype)}, {self.device})"
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "HMM":
        """Return a copy on another device or with another dtype.

        Beliefs are float32 or wider, independently of the dtype of the tables.

        Args:
            device: Device of the tables; None keeps it.
            dtype: Dtype of transition and emission; None keeps it.

        Returns:
            The converted HMM.

        Raises:
            InvalidModelError: Probabilities cannot be stored in `dtype`, or all probabilities of a
                token underflow in it.

        Example:
            >>> hmm.to(dtype=torch.bfloat16).dtype
            torch.bfloat16
        """
        return HMM(
            self.initial.to(device),
            self.transition.to(device, dtype),
            self.emission.to(device, dtype),
            self.config,
        )

    def sparsify(self, tolerance: float = 1e-3) -> "HMM":
        """Return an approximation with a sparse emission plus a background.

        Sequences drawn from the HMM lose on average at most `tolerance` nats of log-likelihood per
        token. `config.sparsification` holds the measured loss of the worst state.

        Args:
            tolerance: Largest loss in nats per token, between 1e-6 and 1.

        Returns:
            The sparse HMM.

        Raises:
            InvalidInputError: The tolerance is out of range, or the emission is not dense.

        Example:
            >>> sparse = hmm.sparsify(1e-2)
            >>> sparse.emission.kind
            'sparse+background'
            >>> sparse.config.sparsification["nats_per_token"] <= 1e-2
            True
        """
        if not isinstance(self.emission, DenseEmission):
            raise InvalidInputError(
                f"The emission is {self.emission.kind} already. Sparsify the dense HMM instead: "
                f"otherwise the losses add up without being measured."
            )
        emission, cost = sparsify(self.emission, tolerance)
        config = replace(self.config, sparsification=asdict(cost))
        return HMM(self.initial, self.transition, emission, config)

    def log_likelihood(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the log-likelihood of every sequence, in nats.

        A token that no reachable state emits counts as log(1e-30): see `foretrace.hmm.inference`.

        Args:
            tokens: Token ids, (batch, length).
            mask: True where there is a token, (batch, length). None for no padding.

        Returns:
            log p(x), (batch,).

        Raises:
            InvalidInputError: Shapes are wrong, or ids are outside the vocabulary.

        Example:
            >>> tokens = torch.tensor([[3, 5, 0], [7, 7, 7]])
            >>> mask = torch.tensor([[True, True, False], [True, True, True]])
            >>> hmm.log_likelihood(tokens, mask).shape
            torch.Size([2])
        """
        return inference.log_likelihood(self, *self._check_tokens(tokens, mask))

    def filter(self, tokens: Tensor, mask: Tensor | None = None) -> Filtered:
        """Compute the state distributions given the tokens up to each position.

        Args:
            tokens: Token ids, (batch, length).
            mask: True where there is a token, (batch, length). None for no padding.

        Returns:
            `belief`, `predicted` and `log_probability` at every position, (batch, length, ...).

        Raises:
            InvalidInputError: Shapes are wrong, or ids are outside the vocabulary.

        Example:
            >>> filtered = hmm.filter(torch.tensor([[3, 5]]))
            >>> next_token = hmm.emission.predict(filtered.predicted[:, -1])
            >>> torch.allclose(next_token.sum(-1), torch.ones(1))
            True
        """
        return inference.filter(self, *self._check_tokens(tokens, mask))

    def smooth(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the state posteriors given the complete sequences.

        Args:
            tokens: Token ids, (batch, length).
            mask: True where there is a token, (batch, length). None for no padding.

        Returns:
            p(z_t | x), (batch, length, h); 0 where masked.

        Raises:
            InvalidInputError: Shapes are wrong, or ids are outside the vocabulary.

        Example:
            >>> hmm.smooth(torch.tensor([[3, 5]])).shape
            torch.Size([1, 2, 8])
        """
        return inference.smooth(self, *self._check_tokens(tokens, mask))

    def sample(self, count: int, length: int, seed: int | None = None) -> Tensor:
        """Draw sequences of tokens.

        Args:
            count: Number of sequences.
            length: Tokens per sequence.
            seed: Seed of the random numbers. None uses torch's global generator.

        Returns:
            Token ids, (count, length).

        Raises:
            InvalidInputError: `count` or `length` is below 1.

        Example:
            >>> hmm.sample(2, 5, seed=0).shape
            torch.Size([2, 5])
        """
        if count < 1 or length < 1:
            raise InvalidInputError(
                f"Cannot draw {count} sequences of {length} tokens: both must be at least 1."
            )
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        return inference.sample(self, count, length, generator).tokens

    def token_frequencies(self, length: int = 64) -> Tensor:
        """Compute the mean probability of each token over the first `length` tokens of a text.

        The end of a text does not count: its tokens have the frequency 0.

        Args:
            length: Tokens per text.

        Returns:
            Frequencies that sum to 1, (V,). `Attribute.fit` takes them.

        Raises:
            InvalidInputError: `length` is below 1.

        Example:
            >>> hmm.token_frequencies().shape
            torch.Size([374])
        """
        if length < 1:
            raise InvalidInputError(f"`length` must be at least 1 token, not {length}.")
        belief, total = self.initial[None], torch.zeros_like(self.initial[None])
        for _ in range(length):
            total += belief
            belief = self.transition.predict(belief)
        frequencies = self.emission.predict(total / length)[0].double()
        frequencies[list(self.config.eos_token_ids)] = 0.0
        return frequencies / frequencies.sum().clamp_min(inference.IMPOSSIBLE)

    def _check_tokens(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Check tokens and mask, and move them to the device; masked tokens may be any number."""
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
                    f"mask has shape {tuple(mask.shape)}, but must have the shape of the tokens, "
                    f"{tuple(tokens.shape)}."
                )
            mask = mask.to(self.device, torch.bool)
            tokens = tokens.masked_fill(~mask, 0)
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.vocab_size:
            raise InvalidInputError(
                f"Token ids range from {low} to {high}, but the vocabulary from 0 to "
                f"{self.vocab_size - 1}. Use the tokenizer that the HMM was made with. If the ids "
                f"are padding, mask them."
            )
        return tokens, mask

    def save_pretrained(
        self, folder: str | os.PathLike[str], dtype: torch.dtype | None = None
    ) -> None:
        """Write `config.json` and `hmm.safetensors`.

        Existing files are replaced atomically: a write that fails leaves them unchanged.

        Args:
            folder: Folder to write to; it is created if needed.
            dtype: Dtype to convert the tables to. None keeps it.

        Raises:
            InvalidInputError: The metadata cannot be written as JSON.
            InvalidModelError: Probabilities cannot be stored in `dtype`.

        Example:
            >>> hmm.save_pretrained(folder / "hmm", dtype=torch.bfloat16)
            >>> ft.HMM.from_pretrained(folder / "hmm").dtype
            torch.bfloat16
        """
        storage.write(
            _remote.to_path(folder), self if dtype is None else self.to(dtype=dtype), self.config
        )

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> Self:
        """Load an HMM. Its tables are memory-mapped, not copied.

        Args:
            source: A local folder or a Hugging Face hub repository.
            revision: Branch, tag or commit of the hub repository.
            tokenizer_fingerprint: `foretrace.fingerprint` of the tokenizer in use, to check that
                the HMM was made with it. None skips the check.

        Returns:
            The HMM.

        Raises:
            InvalidFileError: A file is missing or damaged, or does not hold an HMM.
            TokenizerMismatchError: The HMM was made with another tokenizer.

        Example:
            >>> hmm.save_pretrained(folder / "saved")
            >>> ft.HMM.from_pretrained(folder / "saved").checksum == hmm.checksum
            True
        """
        stored = storage.read(source, revision, tokenizer_fingerprint)
        try:
            return cls(*stored)
        except InvalidModelError as error:
            raise InvalidFileError(f"{source}: {error}") from error


def _normalised(initial: Tensor, total: Tensor) -> Tensor:
    """Divide by the total, unless it is 1 up to rounding: saving and loading must be exact."""
    return initial if float((total - 1).abs()) < 1e-6 else initial / total
