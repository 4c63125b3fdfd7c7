"""The lookahead of an attribute: backward tables, and the EAP of next tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.attribute.evidence import Evidence
from foretrace.attribute.terms import Terms
from foretrace.attribute.token_ids import find_sorted
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.device_automaton import DeviceAutomaton
from foretrace.lookahead.eap import EapKind, NextTokenJoint, TermWeights, compute_eap
from foretrace.lookahead.tables import Tables, build_tables, stores_complement
from foretrace.vocabulary import require_same_fingerprint

MIN_LOG_WEIGHT = -1e4  # stands for log 0, in the range of float16

TokenIds = Sequence[int] | NDArray[np.integer] | Tensor


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Lookahead:
    """Backward tables of an attribute under an HMM. It is immutable, and requests share it.

    `tables.values[r, k, q, z]` belongs to term k, r tokens to come, the automaton state q and the
    HMM state z before them. It is the expected product of the tokens' weights and of the
    final weight: eq. (backward). If coefficients have both signs, it is 1 minus that product, which
    keeps the digits of small differences. The HMM is homogeneous, so that one table serves
    sequences of every length.

    For an attribute with evidence, the weight of a token is the exponential of its reward. The EAP
    is then the expected exponential of all rewards, which may exceed 1, instead of a probability.

    Attributes:
        hmm: The HMM of the language model.
        attribute: The attribute to look ahead for.
        horizon: The largest number of tokens after the next one that are taken into account.
        terms: The attribute's terms, with end-of-text tokens at weight 1. Evidence is included: its
            rewards are log-weights.
        coefficients: The terms' coefficients, (K,) float64, on the HMM's device.
        tokens: The tokens with a weight other than 1, (M,), increasing.
        token_weights: The weights of all tokens, (K, V): their logarithms if `kind.logarithmic`, 1
            minus the weight if `kind.complement`.
        once_rewards: The rewards that count once per text, of all tokens, (V,); None if there are
            none. The log-weights of a token that was generated before are less by its reward.
        automaton: The attribute's automaton on the HMM's device; None if it has none.
        kind: How the EAP is computed.
        min_tokens: The fewest tokens that can satisfy the automaton; 0 if there is none.

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
    once_rewards: Tensor | None
    automaton: DeviceAutomaton | None
    kind: EapKind
    min_tokens: int
    _log_weights: Tensor  # (M, K) float64
    _by_strength: dict[float, "Lookahead"]

    def __init__(
        self,
        hmm: HMM,
        attribute: Attribute,
        horizon: int = 64,
        *,
        tables: Tables | None = None,
    ) -> None:
        """Check the attribute. The tables are built when they are first used.

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
        terms, once = _checked_terms(hmm, attribute, horizon)
        tokens = terms.tokens.to(hmm.device, torch.long)
        log_weights = terms.log_weights.double()
        kind = EapKind(len(terms), stores_complement(terms))
        weighted = terms.automaton
        automaton = None if weighted is None else DeviceAutomaton.from_weighted(weighted, hmm)
        fields: dict[str, object] = {
            "hmm": hmm,
            "attribute": attribute,
            "horizon": horizon,
            "terms": terms,
            "coefficients": terms.coefficients.to(hmm.device),
            "tokens": tokens,
            "token_weights": _token_weights(hmm, terms, kind),
            "once_rewards": None if once is None else once.to(hmm.initial),
            "automaton": automaton,
            "kind": kind,
            "_log_weights": log_weights.T.contiguous().to(hmm.device),
            "min_tokens": 0 if automaton is None else int(automaton.min_tokens[0]),
            "_by_strength": {},
        }
        if tables is not None:
            fields["tables"] = Tables(*(tensor.to(hmm.device) for tensor in tables))
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @cached_property
    def tables(self) -> Tables:
        """The backward tables."""
        return build_tables(self.hmm, self.terms, self.horizon)

    def __repr__(self) -> str:
        return f"Lookahead({self.attribute.name}, {len(self.terms)} terms, {self.horizon} tokens)"

    @property
    def nbytes(self) -> int:
        """The size in bytes, without the HMM."""
        tensors = [*self.tables, self.token_weights, self.tokens, self._log_weights]
        if self.once_rewards is not None:
            tensors.append(self.once_rewards)
        automaton = 0 if self.automaton is None else self.automaton.nbytes
        return automaton + sum(tensor.nbytes for tensor in tensors)

    def at_strength(self, strength: float) -> "Lookahead":
        """Return the lookahead of the attribute's power, `attribute ** strength`.

        Every strength has its own tables. They are built once, and kept as long as this object.

        Args:
            strength: The exponent; 1 returns this object.

        Returns:
            The lookahead.

        Raises:
            InvalidInputError: If the strength is not above 0, or the attribute has no powers.

        Example:
            >>> lookahead = ft.Lookahead(hmm, attribute, horizon=8)
            >>> lookahead.at_strength(4.0).attribute.name
            'nontoxic ** 4'
        """
        if strength == 1:
            return self
        if strength not in self._by_strength:
            powered = Lookahead(self.hmm, self.attribute**strength, self.horizon)
            self._by_strength[strength] = powered
        return self._by_strength[strength]

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

    @property
    def requires_text(self) -> bool:
        """Whether a text can lack what the automaton requires, and get it with more tokens."""
        automaton = self.terms.automaton
        return automaton is not None and automaton.requires_text(self.hmm.vocab_size)

    def require_feasible(self, max_tokens: int) -> None:
        """Check that a sequence of `max_tokens` generated tokens can satisfy the automaton.

        Args:
            max_tokens: The largest number of tokens to generate, or that a goal is about.

        Raises:
            InvalidInputError: If the constraint needs more tokens.
        """
        if self.min_tokens > max_tokens:
            raise InvalidInputError(
                f"'{self.attribute.name}' takes {self.min_tokens} tokens at least, but at most "
                f"{max_tokens} may be generated. Raise the limit, or the goal's window."
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
            Probabilities of shape (V,); for evidence, expected exponentials of rewards.

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
        values = (eap.values + eap.log_scale).exp_()[:, 0]
        return values if self.attribute.evidence else values.clamp_max_(1.0)

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


def _token_weights(hmm: HMM, terms: Terms, kind: EapKind) -> Tensor:
    """Return the weights of all tokens in the form of a kind: (K, V)."""
    log_weights = terms.log_weights.double()
    if kind.logarithmic:
        default, weights = 0.0, log_weights.clamp_min(MIN_LOG_WEIGHT)
    elif kind.complement:
        default, weights = 0.0, -log_weights.expm1()  # 1 - w, without cancellation
    else:
        default, weights = 1.0, log_weights.exp()
    all_weights = hmm.initial.new_full((len(terms), hmm.vocab_size), default)
    all_weights[:, terms.tokens.to(hmm.device, torch.long)] = weights.to(hmm.initial)
    return all_weights


def _checked_terms(hmm: HMM, attribute: Attribute, horizon: int) -> tuple[Terms, Tensor | None]:
    """Return the terms for the HMM's vocabulary, with evidence, and the rewards that count once.

    Raise if the attribute does not fit the HMM, or cannot be steered toward.
    """
    require_same_fingerprint(
        f"The attribute '{attribute.name}'",
        attribute.config.tokenizer_fingerprint,
        hmm.config.tokenizer_fingerprint,
    )
    terms = _neutralized(attribute, hmm)
    evidence = [one.without(hmm.config.eos_token_ids) for one in attribute.evidence]
    if evidence and not terms.is_product:
        raise InvalidInputError(
            f"{attribute.name} combines evidence with a sum of {len(terms)} products. Combine "
            f"evidence with single products, constraints and other evidence only."
        )
    for one in evidence:
        terms = terms.rewarded(one.tokens, one.rewards)
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
    return terms, _once_rewards(evidence, hmm.vocab_size)


def _once_rewards(evidence: Sequence[Evidence], vocab_size: int) -> Tensor | None:
    """Add up the rewards that count once per text: (V,), or None if there are none."""
    counted_once = [one for one in evidence if one.first_only]
    if not counted_once:
        return None
    rewards = torch.zeros(vocab_size, dtype=torch.float64)
    for one in counted_once:
        rewards[one.tokens.long()] += one.rewards.double()
    return rewards


def _neutralized(attribute: Attribute, hmm: HMM) -> Terms:
    """Return the terms with weight 1 and no transition for end-of-text and unknown tokens."""
    terms, vocab_size = attribute.terms, attribute.config.vocab_size
    neutral = list(hmm.config.eos_token_ids)
    if terms.automaton is None:
        return terms.without(neutral)
    neutral += range(vocab_size or hmm.vocab_size, hmm.vocab_size)
    return terms.without(neutral).restricted(hmm.vocab_size)
