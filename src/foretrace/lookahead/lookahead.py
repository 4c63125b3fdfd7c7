"""The lookahead of an attribute: backward tables, and the EAP of next tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.attribute.sorted_ids import find_sorted
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.device_automaton import DeviceAutomaton
from foretrace.lookahead.eap import EapKind, NextTokenJoint, TermWeights, compute_eap
from foretrace.lookahead.tables import Tables, build_tables, stores_complement
from foretrace.vocabulary import require_same_fingerprint

TokenIds = Sequence[int] | NDArray[np.integer] | Tensor


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Lookahead:
    """Backward tables of an attribute under an HMM. It is immutable, and requests share it.

    `tables.values[r, k, q, z]` belongs to term k, r tokens to come, the automaton state q and the
    HMM state z before them. It is the expected product of the tokens' weights and of the
    final weight: eq. (backward). If coefficients have both signs, it is 1 minus that product, which
    keeps the digits of small differences. The HMM is homogeneous, so that one table serves
    sequences of every length.

    Attributes:
        hmm: The HMM of the language model.
        attribute: The attribute to look ahead for.
        horizon: The largest number of tokens after the next one that are taken into account.
        terms: The attribute's terms, with end-of-text tokens at weight 1.
        coefficients: The terms' coefficients, (K,) float64, on the HMM's device.
        tokens: The tokens with a weight other than 1, (M,), increasing.
        token_weights: The weights of all tokens, (K, V); 1 minus the weight if `kind.complement`.
        tables: The backward tables.
        automaton: The attribute's automaton on the HMM's device; None if it has none.
        kind: How the EAP is computed.

    Example:
        >>> lookahead = ft.Lookahead(hmm, attribute, horizon=8)
        >>> lookahead.horizon
        8
        >>> goal = ft.Goal(lookahead, strength=2.0)
    """

    hmm: HMM
    attribute: Attribute
    horizon: int
    terms: Terms
    coefficients: Tensor
    tokens: Tensor
    token_weights: Tensor
    tables: Tables
    automaton: DeviceAutomaton | None
    kind: EapKind
    _log_weights: Tensor  # (M, K) float64
    _min_tokens: int  # fewest generated tokens that can satisfy the automaton

    def __init__(
        self,
        hmm: HMM,
        attribute: Attribute,
        horizon: int = 64,
        *,
        tables: Tables | None = None,
    ) -> None:
        """Build the backward tables.

        Args:
            hmm: The HMM of the language model.
            attribute: The attribute, fitted with the tokenizer of that language model.
            horizon: How many tokens to look ahead after the next one. 0 weighs the next token
                alone.
            tables: Tables that were built before for the same HMM, attribute and horizon.

        Raises:
            InvalidInputError: If the horizon is negative, if the attribute weighs tokens outside
                the HMM's vocabulary, or if its probability is 0 for every sequence.
            TokenizerMismatchError: If HMM and attribute belong to different tokenizers.
        """
        terms = _checked_terms(hmm, attribute, horizon)
        tokens = terms.tokens.to(hmm.device, torch.long)
        log_weights = terms.log_weights.double()
        losses = (-log_weights.expm1()).to(hmm.initial)  # 1 - w, without cancellation
        complement = stores_complement(terms)
        token_weights = losses.new_full((len(terms), hmm.vocab_size), 0.0 if complement else 1.0)
        token_weights[:, tokens] = losses if complement else log_weights.exp().to(losses)
        if tables is None:
            loss = hmm.emission.expect(losses, tokens).clamp(0.0, 1.0)  # (K, h)
            tables = build_tables(hmm, terms, loss, horizon)
        weighted = terms.automaton
        automaton = None if weighted is None else DeviceAutomaton.from_weighted(weighted, hmm)
        fields = {
            "hmm": hmm,
            "attribute": attribute,
            "horizon": horizon,
            "terms": terms,
            "coefficients": terms.coefficients.to(hmm.device),
            "tokens": tokens,
            "token_weights": token_weights,
            "tables": Tables(*(tensor.to(hmm.device) for tensor in tables)),
            "automaton": automaton,
            "kind": EapKind(len(terms), complement),
            "_log_weights": log_weights.T.contiguous().to(hmm.device),
            "_min_tokens": 0 if automaton is None else int(automaton.min_tokens[0]),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Lookahead({self.attribute.name}, {len(self.terms)} terms, {self.horizon} tokens)"

    @property
    def nbytes(self) -> int:
        """The size in bytes, without the HMM."""
        tensors = (*self.tables, self.token_weights, self.tokens, self._log_weights)
        automaton = 0 if self.automaton is None else self.automaton.nbytes
        return automaton + sum(tensor.nbytes for tensor in tensors)

    def table_for(self, remaining: int, states: Tensor | int = 0) -> Tensor:
        """Return the table values for a number of tokens to come.

        Args:
            remaining: The number of tokens after the next one; at most the horizon is used.
            states: Automaton states, (D,), or one of them.

        Returns:
            Values of shape (K, D, h), or (K, h) for one state.
        """
        return self.tables.values[min(remaining, self.horizon)][:, states]

    def log_scale_for(self, remaining: int, states: Tensor | int = 0) -> Tensor:
        """Return the log-scales of the values that `table_for` returns.

        Args:
            remaining: The number of tokens after the next one; at most the horizon is used.
            states: Automaton states, (D,), or one of them.

        Returns:
            float64 of shape (K, D), or (K,) for one state.
        """
        return self.tables.log_scales[min(remaining, self.horizon)][:, states]

    def require_feasible(self, max_tokens: int) -> None:
        """Check that a sequence of `max_tokens` generated tokens can satisfy the automaton.

        Args:
            max_tokens: The largest number of tokens to generate.

        Raises:
            InvalidInputError: If the constraint needs more tokens.
        """
        if self._min_tokens > max_tokens:
            raise InvalidInputError(
                f"'{self.attribute.name}' takes {self._min_tokens} tokens at least, but at most "
                f"{max_tokens} may be generated. Raise the limit."
            )

    def log_weights(self, tokens: Tensor) -> Tensor:
        """Return the log-weights of tokens for every term.

        Args:
            tokens: Token ids of any shape, on the HMM's device.

        Returns:
            float64 of shape (*tokens.shape, K).
        """
        if not len(self.tokens):
            return self.coefficients.new_zeros(*tokens.shape, len(self.terms))
        index, is_weighted = find_sorted(self.tokens, tokens)
        return torch.where(is_weighted.unsqueeze(-1), self._log_weights[index], 0.0)

    def eap(self, prefix: TokenIds, remaining: int) -> Tensor:
        """Compute the EAP of every next token: eq. (EAP).

        The prefix is the prompt: the weights of its tokens do not count.

        Args:
            prefix: Token ids of one sequence: a list, an array or a tensor. It may be empty.
            remaining: The number of tokens that may follow the next one; at most the horizon is
                used.

        Returns:
            Probabilities of shape (V,).

        Raises:
            InvalidInputError: If `remaining` is negative, or if the prefix is not one sequence of
                token ids of the HMM's vocabulary.

        Example:
            >>> eap = ft.Lookahead(hmm, attribute, horizon=8).eap([5, 7], remaining=4)
            >>> eap.shape == (hmm.vocab_size,), bool(((eap >= 0) & (eap <= 1)).all())
            (True, True)
        """
        if remaining < 0:
            raise InvalidInputError(f"`remaining` must be 0 or more tokens, but is {remaining}.")
        predicted = self.predicted(prefix)
        if self.automaton is None:
            return self._eap_for_state(predicted, remaining, 0)
        vocabulary = torch.arange(self.hmm.vocab_size, device=self.hmm.device)
        next_states = self.automaton.step(torch.zeros_like(vocabulary), vocabulary)
        eap = predicted.new_zeros(self.hmm.vocab_size)
        for state in torch.unique(next_states).tolist():
            state_eap = self._eap_for_state(predicted, remaining, state)
            eap = torch.where(next_states == state, state_eap, eap)
        return eap

    def _eap_for_state(self, predicted: Tensor, remaining: int, state: int) -> Tensor:
        """Compute the EAP as if every next token led to this automaton state: (1, h) -> (V,)."""
        weighted = predicted * self.table_for(remaining, state)  # (K, h)
        product = self.hmm.emission.predict(torch.cat([predicted, weighted])).T  # (V, 1 + K)
        joint = NextTokenJoint(
            product[:, 1:].unsqueeze(-1), product[:, :1], weighted.sum(-1, keepdim=True)
        )
        weights = TermWeights(
            self.coefficients[:, None],
            self.log_scale_for(remaining, state)[:, None],
            [self.token_weights],
            torch.zeros(1, dtype=torch.long),
        )
        eap = compute_eap(self.kind, joint, weights, slice(0, self.hmm.vocab_size))
        return (eap.values * eap.log_scale.exp())[:, 0].clamp_max_(1.0)

    def predicted(self, prefix: TokenIds) -> Tensor:
        """Return the distribution of the HMM state that emits the next token.

        Args:
            prefix: Token ids of one sequence: a list, an array or a tensor. It may be empty.

        Returns:
            Probabilities of shape (1, h).

        Raises:
            InvalidInputError: If the prefix is not one sequence of token ids of the HMM's
                vocabulary.
        """
        tokens = _token_ids(prefix, self.hmm.vocab_size)
        if not len(tokens):
            return self.hmm.initial[None]
        *_, last = inference.scan(self.hmm, tokens[None].to(self.hmm.device))
        return last.predicted


def _token_ids(prefix: TokenIds, vocab_size: int) -> Tensor:
    """Return token ids as a tensor: (T,)."""
    ids = torch.as_tensor(prefix)
    if ids.dim() != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)):
        raise InvalidInputError(
            f"A prefix must be the token ids of one sequence, but is {ids.dtype} of shape "
            f"{tuple(ids.shape)}."
        )
    ids = ids.long()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InvalidInputError(
            f"Token ids must be from 0 to {vocab_size - 1}, but are from {int(ids.min())} to "
            f"{int(ids.max())}. Use the tokenizer of the HMM's LM."
        )
    return ids


def _checked_terms(hmm: HMM, attribute: Attribute, horizon: int) -> Terms:
    """Return the attribute's terms for the HMM's vocabulary; raise if they do not fit."""
    require_same_fingerprint(
        f"The attribute '{attribute.name}'",
        attribute.config.tokenizer_fingerprint,
        hmm.config.tokenizer_fingerprint,
    )
    terms = _neutralized(attribute, hmm)
    if len(terms.tokens) and int(terms.tokens[-1]) >= hmm.vocab_size:
        raise InvalidInputError(
            f"'{attribute.name}' weighs token {int(terms.tokens[-1])}, but the HMM has a "
            f"vocabulary of {hmm.vocab_size}. Fit it with the tokenizer of the HMM's LM."
        )
    if horizon < 0:
        raise InvalidInputError(f"A horizon must be 0 or more tokens, but is {horizon}.")
    if not len(terms):
        raise InvalidInputError(
            f"'{attribute.name}' is never true of any text. Steering toward it is impossible."
        )
    return terms


def _neutralized(attribute: Attribute, hmm: HMM) -> Terms:
    """Return the terms with weight 1 and no transition for end-of-text and unknown tokens."""
    terms, vocab_size = attribute.terms, attribute.config.vocab_size
    neutral = list(hmm.config.eos_token_ids)
    if terms.automaton is None:
        return terms.without(neutral)
    neutral += range(vocab_size or hmm.vocab_size, hmm.vocab_size)
    return terms.without(neutral).restricted(hmm.vocab_size)
