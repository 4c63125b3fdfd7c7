"""Signed sums of products of token weights: the algebra that attributes live in.

p(x) = sum over k of c_k times the product over i of w_k(x_i), times what the state is worth that an
automaton ends in after it has read x. Only tokens with a weight below 1 in some term are kept, and
weights as logarithms: products become sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from foretrace.attribute.automata.weighted import Memory, together
from foretrace.attribute.sorted_ids import lookup
from foretrace.errors import InvalidInputError

MOST_TERMS = 1024  # every term costs its own table and its own share of a decoding step
ROUNDING = 1e-13  # relative to the summands: a sum of coefficients below it is 0
LARGEST_TOTAL = 1e30  # of the coefficients' absolute values: decoding uses float32
REPEATS = (1, 4, 16, 64)  # of each token, in texts that `require_probability` tries
VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Terms:
    """K products over the M tokens that matter to any of them."""

    coefficients: Tensor  # (K,) float64
    tokens: Tensor  # (M,) int32, rising
    log_weights: Tensor  # (K, M), at most 0
    memory: Memory | None = None

    def __post_init__(self) -> None:
        shape = (len(self.coefficients), len(self.tokens))
        ordered = bool((self.tokens[1:] > self.tokens[:-1]).all())
        if self.log_weights.shape != shape or not ordered or bool((self.tokens < 0).any()):
            raise InvalidInputError(
                "An attribute needs its tokens once each, in rising order, and for each of its "
                "terms a log-weight for each of its tokens."
            )
        if not bool((self.log_weights <= 0).all()) or not bool(self.coefficients.isfinite().all()):
            raise InvalidInputError("Weights must be in [0, 1], and coefficients finite numbers.")
        if self.memory is not None and len(self.memory.finals) != len(self):
            raise InvalidInputError("Every term must say what the automaton's states are worth.")

    @classmethod
    def one(cls) -> Self:
        """Give the empty product: 1, whatever the text."""
        ones = torch.ones(1, dtype=torch.float64)
        return cls(ones, torch.zeros(0, dtype=torch.int32), torch.zeros(1, 0))

    def __len__(self) -> int:
        return len(self.coefficients)

    @property
    def signed(self) -> bool:
        """Whether some coefficient is negative, so that terms may cancel."""
        return bool((self.coefficients < 0).any())

    @property
    def states(self) -> int:
        """How many the automaton has; 1 if there is none."""
        return 1 if self.memory is None else self.memory.automaton.num_states

    def weights(self, tokens: Tensor) -> Tensor:
        """Give the weights of tokens, rising: (n,) ids -> (K, n) float64."""
        every = torch.unique(torch.cat([self.tokens, tokens.to(self.tokens.dtype)]))
        return self._over(every)[:, torch.searchsorted(every, tokens.to(every.dtype))].exp()

    def without(self, tokens: Sequence[int]) -> Self:
        """Give the same without these tokens: they count as 1, and are not remembered."""
        kept = ~torch.isin(self.tokens, torch.tensor(tokens, dtype=self.tokens.dtype))
        memory = None if self.memory is None else self.memory.resting(tokens)
        return type(self)(self.coefficients, self.tokens[kept], self.log_weights[:, kept], memory)

    def reading_below(self, vocab_size: int) -> Self:
        """Give the same, of a vocabulary that ends there."""
        assert self.memory is not None
        return replace(self, memory=self.memory.reading_below(vocab_size))

    def negated(self) -> Self:
        """Give 1 - p."""
        return self.one()._plus(self, -1.0)

    def times(self, other: Self) -> Self:
        """Give p * q: every term with every other."""
        _require_few(len(self) * len(other))
        tokens, ours, theirs = self._aligned(other)
        product = (ours[:, None] + theirs[None]).flatten(0, 1)
        coefficients = (self.coefficients[:, None] * other.coefficients).flatten()
        automaton, left, right = together(self.memory, other.memory, len(self), len(other))
        memory = Memory(automaton, (left[:, None] * right).flatten(0, 1))
        return self._merged(coefficients, tokens, product, memory)

    def either(self, other: Self) -> Self:
        """Give p + q - p * q."""
        _require_few(len(self) + len(other) + len(self) * len(other))
        return self._plus(other)._plus(self.times(other), -1.0)

    def _plus(self, other: Self, factor: float = 1.0) -> Self:
        tokens, ours, theirs = self._aligned(other)
        coefficients = torch.cat([self.coefficients, factor * other.coefficients])
        log_weights = torch.cat([ours, theirs])
        automaton, *finals = together(self.memory, other.memory, len(self), len(other))
        memory = Memory(automaton, torch.cat(finals))
        return self._merged(coefficients, tokens, log_weights, memory)

    def _aligned(self, other: Self) -> tuple[Tensor, Tensor, Tensor]:
        """Spread the log-weights of both over the tokens of either, in float64.

        Sums of a few float32, as fitted ones are, are exact in float64: (a & b) & c and a & (b & c)
        are equal terms.
        """
        tokens = torch.unique(torch.cat([self.tokens, other.tokens]))
        return tokens, self._over(tokens), other._over(tokens)

    def _over(self, tokens: Tensor) -> Tensor:
        spread = torch.zeros(len(self), len(tokens), dtype=torch.float64)
        spread[:, torch.searchsorted(tokens, self.tokens)] = self.log_weights.double()
        return spread

    @classmethod
    def _merged(
        cls, coefficients: Tensor, tokens: Tensor, log_weights: Tensor, memory: Memory
    ) -> Self:
        """Add up equal products, state by state; leave out what cancels, and what is alike.

        So of constraints alone, however they are joined, there is one term in the end.
        """
        log_weights = log_weights + 0.0  # -0.0 becomes 0.0: they are equal, but not their bytes
        worth: dict[bytes, tuple[int, Tensor, Tensor]] = {}
        for row, weights in enumerate(log_weights):
            nothing = torch.zeros_like(memory.finals[row])
            key = weights.numpy().tobytes()
            _, sums, sizes = worth.setdefault(key, (row, nothing, nothing.clone()))
            sums += coefficients[row] * memory.finals[row]
            sizes += coefficients[row].abs() * memory.finals[row]
        for _, sums, sizes in worth.values():
            sums[sums.abs() <= ROUNDING * sizes] = 0.0
        signed = [
            (row, sign, part)
            for row, sums, _ in worth.values()
            for sign, part in ((1.0, sums.clamp_min(0.0)), (-1.0, sums.neg().clamp_min(0.0)))
            if bool((part > 0).any())
        ]
        rows, signs = [row for row, *_ in signed], [sign for _, sign, _ in signed]
        parts = torch.stack([part for *_, part in signed]) if signed else memory.finals[:0]
        sizes = parts.amax(1)
        matter = (log_weights[rows] != 0).any(0)
        return cls(
            torch.tensor(signs, dtype=torch.float64) * sizes,
            tokens[matter],
            log_weights[rows][:, matter],
            Memory(memory.automaton, parts / sizes[:, None]).reduced(),
        )

    def require_probability(self) -> None:
        """Raise if the terms yield a value outside [0, 1] for the texts that can be tried.

        The texts are the empty one and repetitions of one token, in every state of the automaton.
        Whatever `times`, `either` and `negated` build passes: each operation maps values in [0, 1]
        to values in [0, 1], in any state and for any weights. Other texts are too many to try;
        `probability` clamps their values.
        """
        if not len(self):
            return
        total = float(self.coefficients.abs().sum())
        if not total <= LARGEST_TOTAL or not bool((self.coefficients > 0).any()):
            raise InvalidInputError(
                "The coefficients do not form a probability: none of them is positive, or they "
                "are too large."
            )
        tolerance = 1e-6 + 1e-12 * total
        finals = None if self.memory is None else self.memory.finals
        signed = self.coefficients[:, None] * (1.0 if finals is None else finals)  # (K, Q)
        self._require_within(signed, torch.zeros(len(self), 1), tolerance)
        if self.signed:  # otherwise the empty text has the largest value, and none is negative
            for count in REPEATS:
                width = max(1, VALUES_AT_ONCE // max(signed.shape))
                for log_weights in torch.split(self.log_weights, width, 1):
                    self._require_within(signed, count * log_weights.double(), tolerance)

    @staticmethod
    def _require_within(signed: Tensor, log_weights: Tensor, tolerance: float) -> None:
        """Raise if a value is outside [0, 1]: (K, Q) signed final weights, (K, n) log-weights."""
        values = signed.T @ log_weights.double().exp()
        if not bool(((values >= -tolerance) & (values <= 1 + tolerance)).all()):
            raise InvalidInputError(
                f"The terms do not form a probability: their sum reaches "
                f"{float(values.min()):g} to {float(values.max()):g}, outside [0, 1]."
            )

    def sums(self, tokens: Tensor, texts: Tensor, count: int) -> Tensor:
        """Add up log-weights: (N,) ids, and of which of the `count` texts each is -> (count, K)."""
        sums = torch.zeros(count, len(self), dtype=torch.float64)
        if self.memory is not None:
            sums += self.memory.log_finals(tokens, texts, count)
        if not len(self.tokens):
            return sums
        place, weighted = lookup(self.tokens, tokens)
        place, texts = place[weighted], texts[weighted]
        for term, weights in enumerate(self.log_weights):  # one by one: there may be a thousand
            sums[:, term].index_add_(0, texts, weights[place].double())
        return sums

    def probability(self, sums: Tensor) -> Tensor:
        """Combine (..., K) sums of log-weights into p, in [0, 1]: float64.

        1 - w is right to the last digit when w is almost 1, and w when it is almost 0.
        """
        if not len(self):
            return torch.zeros(sums.shape[:-1], dtype=torch.float64)
        return combined(self.coefficients, sums.double())


def combined(coefficients: Tensor, sums: Tensor) -> Tensor:
    """Give the sum of c_k exp(sums_k) over K terms, in [0, 1]: (..., K), (..., K) -> (...).

    The largest product is taken out, and the others are counted as differences from it.
    """
    largest = sums.max(-1, keepdim=True).values.clamp_min(-1e300)
    rest = (coefficients * torch.expm1(sums - largest)).sum(-1)
    return (largest[..., 0].exp() * (coefficients.sum(-1) + rest)).clamp(0.0, 1.0)


def _require_few(terms: int) -> None:
    if terms > MOST_TERMS:
        raise InvalidInputError(
            f"The expression has up to {terms:,} terms, and {MOST_TERMS:,} is the most. Use fewer "
            f"attributes in one expression, or attributes of fewer terms."
        )
