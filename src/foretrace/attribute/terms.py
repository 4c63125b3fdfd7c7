"""Signed sums of products of token weights: the algebra of attributes.

p(x) = sum over k of c_k times the product over i of w_k(x_i), times the weight of the state in
which an automaton ends after reading x. Only tokens with a weight other than 1 in some term are
stored. Weights are stored as logarithms, so that products are sums. The weights of a classifier are
at most 1; steering also uses a single product with larger weights, for rewards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from foretrace.attribute.automaton import WeightedAutomaton, align
from foretrace.attribute.token_ids import find_sorted
from foretrace.errors import InvalidInputError

MAX_TERMS = 1024  # every term adds a lookahead table and a share of each decoding step
ROUNDING = 1e-13  # relative to the summands: a sum of coefficients below it is 0
MAX_TOTAL = 1e30  # of the coefficients' absolute values: decoding uses float32
REPEATS = (1, 4, 16, 64)  # of each token, in texts that `check_probability` tries
VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Terms:
    """K products of token weights, over the M tokens with a weight other than 1 in any of them."""

    coefficients: Tensor  # (K,) float64
    tokens: Tensor  # (M,) int32, ascending
    log_weights: Tensor  # (K, M); at most 0 in a classifier
    automaton: WeightedAutomaton | None = None

    def __post_init__(self) -> None:
        shape = (len(self.coefficients), len(self.tokens))
        ascending = bool((self.tokens[1:] > self.tokens[:-1]).all())
        if self.log_weights.shape != shape or not ascending or bool((self.tokens < 0).any()):
            raise InvalidInputError(
                "An attribute needs distinct token ids in ascending order, and a log-weight for "
                "every term and token."
            )
        if not bool((self.log_weights < torch.inf).all() & self.coefficients.isfinite().all()):
            raise InvalidInputError("Weights and coefficients must be finite numbers.")
        if self.automaton is not None and len(self.automaton.final_weights) != len(self):
            raise InvalidInputError("Every term needs final weights of the automaton's states.")

    @classmethod
    def one(cls) -> Self:
        """Return the empty product: p(x) = 1 for every text."""
        ones = torch.ones(1, dtype=torch.float64)
        return cls(ones, torch.zeros(0, dtype=torch.int32), torch.zeros(1, 0))

    def __len__(self) -> int:
        return len(self.coefficients)

    @property
    def signed(self) -> bool:
        """Return whether some coefficient is negative, so that terms may cancel."""
        return bool((self.coefficients < 0).any())

    @property
    def is_product(self) -> bool:
        """Return whether p is one product: powers of it are exact."""
        return len(self) == 1 and bool(self.coefficients > 0)

    @property
    def num_states(self) -> int:
        """Return the number of states of the automaton; 1 without one."""
        return 1 if self.automaton is None else self.automaton.dfa.num_states

    def weights(self, tokens: Tensor) -> Tensor:
        """Return the weights of tokens: (n,) ids -> (K, n) float64."""
        all_tokens = torch.unique(torch.cat([self.tokens, tokens.to(self.tokens.dtype)]))
        return self._spread(all_tokens)[:, find_sorted(all_tokens, tokens)[0]].exp()

    def without(self, tokens: Sequence[int]) -> Self:
        """Return a copy in which these tokens have weight 1 and do not change the state."""
        kept = ~torch.isin(self.tokens, torch.tensor(tokens, dtype=self.tokens.dtype))
        automaton = None if self.automaton is None else self.automaton.with_self_loops(tokens)
        log_weights = self.log_weights[:, kept]
        return type(self)(self.coefficients, self.tokens[kept], log_weights, automaton)

    def restricted(self, vocab_size: int) -> Self:
        """Return a copy whose automaton has no tokens from `vocab_size` on."""
        assert self.automaton is not None
        return replace(self, automaton=self.automaton.restricted(vocab_size))

    def negated(self) -> Self:
        """Return the terms of 1 - p."""
        return self.one()._add(self, -1.0)

    def times(self, other: Self) -> Self:
        """Return the terms of p * q: the product of every pair of terms."""
        _check_num_terms(len(self) * len(other))
        tokens, left, right = self._aligned(other)
        log_weights = (left[:, None] + right[None]).flatten(0, 1)
        coefficients = (self.coefficients[:, None] * other.coefficients).flatten()
        dfa, *finals = align(self.automaton, other.automaton, len(self), len(other))
        final_weights = (finals[0][:, None] * finals[1]).flatten(0, 1)
        automaton = WeightedAutomaton(dfa, final_weights)
        return self._simplified(coefficients, tokens, log_weights, automaton)

    def either(self, other: Self) -> Self:
        """Return the terms of p + q - p * q."""
        _check_num_terms(len(self) + len(other) + len(self) * len(other))
        return self._add(other)._add(self.times(other), -1.0)

    def power(self, exponent: float) -> Self:
        """Return the terms of p ** exponent, of one product."""
        assert self.is_product
        automaton = self.automaton
        if automaton is not None:
            automaton = replace(automaton, final_weights=automaton.final_weights**exponent)
        return replace(
            self,
            coefficients=self.coefficients**exponent,
            log_weights=self.log_weights.double() * exponent,
            automaton=automaton,
        )

    def rewarded(self, tokens: Tensor, rewards: Tensor) -> Self:
        """Return the terms of p * exp(sum of rewards): (M',) ascending ids, (M',) rewards."""
        rewarded = replace(self.one(), tokens=tokens, log_weights=rewards.double()[None])
        both, left, right = self._aligned(rewarded)
        return replace(self, tokens=both, log_weights=left + right)

    def _add(self, other: Self, factor: float = 1.0) -> Self:
        """Return the terms of p + factor * q."""
        tokens, left, right = self._aligned(other)
        coefficients = torch.cat([self.coefficients, factor * other.coefficients])
        log_weights = torch.cat([left, right])
        dfa, *finals = align(self.automaton, other.automaton, len(self), len(other))
        automaton = WeightedAutomaton(dfa, torch.cat(finals))
        return self._simplified(coefficients, tokens, log_weights, automaton)

    def _aligned(self, other: Self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the union of both token sets, and the log-weights of both over it, in float64.

        Sums of a few float32 numbers are exact in float64: (a & b) & c and a & (b & c) have equal
        terms.
        """
        tokens = torch.unique(torch.cat([self.tokens, other.tokens]))
        return tokens, self._spread(tokens), other._spread(tokens)

    def _spread(self, tokens: Tensor) -> Tensor:
        """Return the log-weights over a superset of the tokens: (M',) -> (K, M') float64."""
        log_weights = torch.zeros(len(self), len(tokens), dtype=torch.float64)
        log_weights[:, find_sorted(tokens, self.tokens)[0]] = self.log_weights.double()
        return log_weights

    @classmethod
    def _simplified(
        cls, coefficients: Tensor, tokens: Tensor, log_weights: Tensor, automaton: WeightedAutomaton
    ) -> Self:
        """Add up terms with equal token weights, drop zero terms and weights, minimize the DFA.

        Constraints without token weights are always one term in the end, however they are combined.
        """
        log_weights = log_weights + 0.0  # -0.0 becomes 0.0: equal numbers need equal bytes
        signed = coefficients[:, None] * automaton.final_weights  # (K, Q)
        first_rows: dict[bytes, int] = {}
        group = []  # of every term, as the first term with equal weights
        for row, weights in enumerate(log_weights):
            group.append(first_rows.setdefault(weights.numpy().tobytes(), row))
        index = torch.tensor(group, dtype=torch.long)
        total = torch.zeros_like(signed).index_add_(0, index, signed)
        size = torch.zeros_like(signed).index_add_(0, index, signed.abs())
        total[total.abs() <= ROUNDING * size] = 0.0
        # Final weights are not negative: one term for each sign.
        parts = torch.stack([total, -total], 1).clamp_min(0.0)  # (K, 2, Q)
        rows, sign_index = (parts > 0).any(-1).nonzero(as_tuple=True)
        finals = parts[rows, sign_index]
        largest = finals.amax(1)
        used = (log_weights[rows] != 0).any(0)
        return cls(
            torch.where(sign_index == 0, largest, -largest),
            tokens[used],
            log_weights[rows][:, used],
            WeightedAutomaton(automaton.dfa, finals / largest[:, None]).minimized(),
        )

    def check_probability(self) -> None:
        """Raise if the terms yield a value outside [0, 1] for some simple texts.

        The texts are the empty one and repetitions of one token, in every state of the automaton.
        The results of `times`, `either` and `negated` pass: each operation maps values in [0, 1] to
        values in [0, 1], in any state and for any weights. Other texts are too many to try;
        `probability` clamps their values.
        """
        if not len(self):
            return
        if not bool((self.log_weights <= 0).all()):
            raise InvalidInputError("The weights of a classifier must be in [0, 1].")
        total = float(self.coefficients.abs().sum())
        if not total <= MAX_TOTAL or not bool((self.coefficients > 0).any()):
            raise InvalidInputError(
                "The coefficients do not form a probability: none of them is positive, or they "
                "are too large."
            )
        tolerance = 1e-6 + 1e-12 * total
        finals = 1.0 if self.automaton is None else self.automaton.final_weights
        signed = self.coefficients[:, None] * finals  # (K, Q)
        _check_range(signed, torch.zeros(len(self), 1), tolerance)
        if not self.signed:
            return  # the empty text has the largest value, and no value is negative
        width = max(1, VALUES_AT_ONCE // max(signed.shape))
        for count in REPEATS:
            for log_weights in torch.split(self.log_weights, width, 1):
                _check_range(signed, count * log_weights.double(), tolerance)

    def sums(self, tokens: Tensor, text_index: Tensor, count: int) -> Tensor:
        """Add up the log-weights of each of `count` texts: (count, K).

        `tokens` (N,) holds the ids of all texts one after the other, and `text_index` (N,) the text
        of each token, in ascending order.
        """
        sums = torch.zeros(count, len(self), dtype=torch.float64)
        if self.automaton is not None:
            sums += self.automaton.log_final_weights(tokens, text_index, count)
        if not len(self.tokens):
            return sums
        index, found = find_sorted(self.tokens, tokens)
        index, text_index = index[found], text_index[found]
        for term, weights in enumerate(self.log_weights):  # one at a time to bound the memory
            sums[:, term].index_add_(0, text_index, weights[index].double())
        return sums

    def probability(self, sums: Tensor) -> Tensor:
        """Combine (..., K) sums of log-weights into p, in [0, 1] and float64."""
        if not len(self):
            return torch.zeros(sums.shape[:-1], dtype=torch.float64)
        return signed_sum(self.coefficients, sums.double())


def signed_sum(coefficients: Tensor, log_products: Tensor) -> Tensor:
    """Compute the sum of c_k exp(log_products_k), in [0, 1]: (..., K), (..., K) -> (...).

    The largest product is factored out, and `expm1` computes the differences from it. The result is
    therefore accurate both for 1 - w with w close to 1, and for w close to 0.
    """
    largest = log_products.max(-1, keepdim=True).values.clamp_min(-1e300)
    differences = (coefficients * torch.expm1(log_products - largest)).sum(-1)
    return (largest[..., 0].exp() * (coefficients.sum(-1) + differences)).clamp(0.0, 1.0)


def _check_range(signed: Tensor, log_weights: Tensor, tolerance: float) -> None:
    """Raise if the sum of terms is outside [0, 1] for one of n texts, in one of Q states.

    Args:
        signed: Coefficients times final weights of automaton states, (K, Q).
        log_weights: The log of the product of token weights of each text, (K, n).
        tolerance: The rounding error to allow.
    """
    values = signed.T @ log_weights.double().exp()
    if not bool(((values >= -tolerance) & (values <= 1 + tolerance)).all()):
        raise InvalidInputError(
            f"The terms do not form a probability: their sum has values from "
            f"{float(values.min()):g} to {float(values.max()):g}, outside [0, 1]."
        )


def _check_num_terms(count: int) -> None:
    if count > MAX_TERMS:
        raise InvalidInputError(
            f"The expression has up to {count:,} terms, but at most {MAX_TERMS:,} are allowed. Use "
            f"fewer attributes in one expression, or attributes of fewer terms."
        )
