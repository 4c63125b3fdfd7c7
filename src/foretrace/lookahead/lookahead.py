"""The lookahead of an attribute: backward tables, and the EAP of next tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.attribute.evidence import Evidence
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.kernels import (
    EapKind,
    GoalGroup,
    expected_weight_,
    log_eap_,
    scale_terms,
)
from foretrace.lookahead.tables import Tables, build_tables, with_missing
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
        first_only: The rewards that count once per text, of all tokens, (V,) float64; None if there
            are none. The log-weight of a token that was generated before is less by its reward.
        kind: How the EAP is computed.
        tables: The backward tables.

    Example:
        >>> lookahead = ft.Lookahead(hmm, attribute, horizon=8)
        >>> lookahead.horizon
        8
    """

    hmm: HMM
    attribute: Attribute
    horizon: int
    terms: Terms
    first_only: Tensor | None
    kind: EapKind
    tables: Tables

    def __init__(
        self,
        hmm: HMM,
        attribute: Attribute,
        horizon: int = 64,
        *,
        tables: Tables | None = None,
    ) -> None:
        """Check the attribute, and build its tables.

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
        terms, first_only = _checked_terms(hmm, attribute, horizon)
        fields: dict[str, object] = {
            "hmm": hmm,
            "attribute": attribute,
            "horizon": horizon,
            "terms": terms,
            "first_only": first_only,
            "kind": EapKind.of(terms),
            "tables": build_tables(hmm, terms, horizon) if tables is None else tables,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Lookahead({self.attribute.name}, {len(self.terms)} terms, {self.horizon} tokens)"

    def __deepcopy__(self, memo: dict[int, object]) -> "Lookahead":
        """Return the lookahead itself: it does not change, and its tables are large."""
        return self

    def with_missing(self) -> "Lookahead":
        """Return a lookahead that knows how probable it is that required text still comes."""
        tables = with_missing(self.hmm, self.terms, self.tables)
        return Lookahead(self.hmm, self.attribute, self.horizon, tables=tables)

    @property
    def nbytes(self) -> int:
        """The size of the tables in bytes."""
        return self.tables.nbytes

    @property
    def num_terms(self) -> int:
        """The number of terms, K."""
        return len(self.terms)

    @property
    def has_constraint(self) -> bool:
        """Whether the attribute has an automaton: texts that must or must not occur."""
        return self.terms.automaton is not None

    @property
    def has_first_only(self) -> bool:
        """Whether there are rewards that count once per text."""
        return self.first_only is not None

    @property
    def has_context(self) -> bool:
        """Whether the attribute has a context reward. Tables and the EAP leave it out."""
        return self.attribute.context is not None

    @property
    def min_tokens(self) -> int:
        """The fewest tokens that satisfy the automaton; 0 if there is none."""
        automaton = self.terms.automaton
        return 0 if automaton is None else int(automaton.min_tokens(self.hmm.vocab_size)[0])

    @property
    def requires_text(self) -> bool:
        """Whether a text can lack what the automaton requires, and get it with more tokens."""
        automaton = self.terms.automaton
        return automaton is not None and automaton.requires_text(self.hmm.vocab_size)

    def token_weights(self) -> Tensor:
        """Return the weights of all tokens in the form of `kind`: (K, V)."""
        log_weights = self.terms.log_weights.double()
        if self.kind == EapKind.LOGARITHMIC:
            default, weights = 0.0, log_weights.clamp_min(MIN_LOG_WEIGHT)
        elif self.kind == EapKind.ONE_MINUS:
            default, weights = 0.0, -log_weights.expm1()  # 1 - w, without cancellation
        else:
            default, weights = 1.0, log_weights.exp()
        hmm = self.hmm
        all_weights = hmm.initial.new_full((len(self.terms), hmm.vocab_size), default)
        all_weights[:, self.terms.tokens.to(hmm.device, torch.long)] = weights.to(hmm.initial)
        return all_weights

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
        return next(self.log_eap_along(self.predicted(prefix), [0], remaining + 1)).exp_()

    def log_eap_along(
        self,
        predicted: Tensor,
        generated: Sequence[int],
        limit: int,
        required_power: float | None = None,
    ) -> Iterator[Tensor]:
        """Compute the log EAP of every next token at each position of a generated text.

        Args:
            predicted: The distribution of the HMM state that emits the first of the tokens, (1, h).
            generated: The generated token ids. The weights of the tokens before a position count.
            limit: The largest number of tokens of the text.
            required_power: The power of the probability that required text comes, as in steering
                with `with_missing`; by default 1, which is the EAP.

        Yields:
            For each position, the logarithm of the EAP of all tokens there, (V,).
        """
        log_past = torch.zeros(len(self.terms), dtype=torch.float64, device=self.hmm.device)
        weights, first_only, state = self.token_weights(), self.first_only, 0
        automaton, seen = self.terms.automaton, set[int]()
        for position, token in enumerate(generated):
            remaining = min(max(0, limit - position - 1), self.horizon)
            log_eap = self._log_eap(predicted, weights, remaining, state, log_past, required_power)
            if first_only is not None and seen:
                index = torch.tensor(sorted(seen), device=log_eap.device)
                log_eap[index] -= first_only.to(log_eap)[index]
            is_probability = not self.attribute.evidence and required_power is None
            yield log_eap.clamp_max_(0.0) if is_probability else log_eap
            if not 0 <= token < self.hmm.vocab_size:
                continue
            ids = torch.tensor([token])
            predicted = inference.step(self.hmm, predicted, ids.to(self.hmm.device)).predicted
            log_past = log_past + self.terms.weights(ids)[:, 0].log().to(log_past.device)
            if first_only is not None and token in seen:
                log_past = log_past - first_only[token]
            seen.add(token)
            if automaton is not None:
                state = int(automaton.dfa.step(torch.tensor([state]), ids))

    def _log_eap(
        self,
        predicted: Tensor,
        weights: Tensor,
        remaining: int,
        state: int,
        log_past: Tensor,
        required_power: float | None,
    ) -> Tensor:
        """Compute the log EAP of every next token: (1, h), (K, V), (K,) -> (V,)."""
        added = 0.0 if required_power is None else required_power - 1
        if self.terms.automaton is None:
            return self._log_eap_of(predicted, weights, remaining, 0, log_past, added)
        vocabulary = torch.arange(self.hmm.vocab_size)
        next_states = self.terms.automaton.dfa.step(torch.full_like(vocabulary, state), vocabulary)
        next_states = next_states.to(predicted.device)
        log_eap = predicted.new_zeros(self.hmm.vocab_size)
        for target in torch.unique(next_states).tolist():
            of_target = self._log_eap_of(predicted, weights, remaining, target, log_past, added)
            log_eap = torch.where(next_states == target, of_target, log_eap)
        return log_eap

    def _log_eap_of(
        self,
        predicted: Tensor,
        weights: Tensor,
        remaining: int,
        target: int,
        log_past: Tensor,
        added_power: float,
    ) -> Tensor:
        """Compute the log EAP as if every next token led to one automaton state: (V,)."""
        count = len(self.terms)
        group = GoalGroup(self.kind, False, slice(0, 1), slice(0, count))
        goals = torch.zeros(count, dtype=torch.long, device=predicted.device)
        coefficients = self.terms.coefficients.to(predicted.device)
        is_single = self.kind == EapKind.LOGARITHMIC
        log_coefficients = coefficients.log() if is_single else torch.zeros_like(coefficients)
        values, log_scales, log_missing = (part[remaining, :, target] for part in self.tables)
        log_scales = log_scales + added_power * log_missing
        terms = scale_terms(
            [group],
            goals,
            1,
            coefficients,
            log_coefficients,
            log_past + log_scales.to(log_past.device),
        )
        weighted = predicted * values.to(predicted)  # (K, h)
        product = self.hmm.emission.predict(torch.cat([predicted, weighted]))  # (1 + K, V)
        probability, joint = product[:1] + inference.IMPOSSIBLE, product[1:]
        ratio = expected_weight_(joint, weighted.sum(-1, keepdim=True), probability)
        log_eap = log_eap_(group, ratio, weights, terms, goals)[0]
        return log_eap + terms.log_scale.to(log_eap)

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


def _checked_terms(hmm: HMM, attribute: Attribute, horizon: int) -> tuple[Terms, Tensor | None]:
    """Return the terms for the HMM's vocabulary, with evidence, and the rewards that count once.

    Raise if the attribute does not fit the HMM, or cannot be steered toward.
    """
    require_same_fingerprint(
        f"The attribute '{attribute.name}'",
        attribute.config.tokenizer_fingerprint,
        hmm.config.tokenizer_fingerprint,
    )
    if horizon < 0:
        raise InvalidInputError(f"A horizon must be 0 or more tokens, but is {horizon}.")
    attribute.require_satisfiable()
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
    return terms, _first_only_rewards(evidence, hmm.vocab_size)


def log_weights_of(hmm: HMM, attribute: Attribute) -> Tensor:
    """Return the log-weights of all tokens for an attribute that is one product: (V,) float64.

    Args:
        hmm: The HMM of the language model.
        attribute: A product, evidence, or a conjunction of them. A constraint is left out.

    Raises:
        InvalidInputError: If the attribute does not fit the HMM.
        TokenizerMismatchError: If HMM and attribute belong to different tokenizers.
    """
    terms, _ = _checked_terms(hmm, attribute, 0)
    log_weights = torch.zeros(hmm.vocab_size, dtype=torch.float64, device=hmm.device)
    log_weights[terms.tokens.to(hmm.device, torch.long)] = (
        terms.log_weights[0].to(log_weights).clamp_min(MIN_LOG_WEIGHT)
    )
    return log_weights


def _first_only_rewards(evidence: Sequence[Evidence], vocab_size: int) -> Tensor | None:
    """Add up the rewards that count once per text: (V,), or None if there are none."""
    counted_once = [one.dense(vocab_size) for one in evidence if one.first_only]
    return torch.stack(counted_once).sum(0) if counted_once else None


def _neutralized(attribute: Attribute, hmm: HMM) -> Terms:
    """Return the terms with weight 1 and no transition for end-of-text and unknown tokens."""
    terms, vocab_size = attribute.terms, attribute.config.vocab_size
    neutral = list(hmm.config.eos_token_ids)
    if terms.automaton is None:
        return terms.without(neutral)
    neutral += range(vocab_size or hmm.vocab_size, hmm.vocab_size)
    return terms.without(neutral).restricted(hmm.vocab_size)
