"""Backward tables: the expected weight of r more tokens, for every r and every HMM state."""

from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.attribute.terms import Terms
from foretrace.hmm import HMM

BELIEF_STEPS = 64  # tokens over which the HMM's states are averaged
LOG_ZERO = -1e30  # stands for log 0; it is finite, so that differences are not NaN


def log_zero_for(logits: Tensor) -> float:
    """Return `LOG_ZERO` in the range of the logits' dtype: float16 cannot hold it."""
    return max(LOG_ZERO, torch.finfo(logits.dtype).min)


class Tables(NamedTuple):
    """Expected weights of the tokens to come: `values * exp(log_scales)`.

    If `stores_one_minus(terms)`, `values` holds 1 minus the expected weight, with scales of 1.
    """

    values: Tensor  # (horizon + 1, K, Q, h)
    log_scales: Tensor  # (horizon + 1, K, Q) float64
    # How probable it is that required text still comes, in logarithms: (horizon + 1, K, Q) float64.
    # Steering counts it more or less than once. It is 0 where no text is missing, or none can come.
    log_missing: Tensor

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return sum(tensor.nbytes for tensor in self)


class Successors(NamedTuple):
    """The states that an automaton can move to from one of its states."""

    targets: Tensor  # (D,)
    weights: Tensor  # (K, D, h): expected weight of the tokens that lead there, by HMM state


def stores_one_minus(terms: Terms) -> bool:
    """Return whether tables hold 1 minus the expected weight.

    Terms of both signs may cancel, and 1 minus the weight keeps the digits of small differences.
    Tables with an automaton are rescaled instead: a constraint is improbable.
    """
    return terms.signed and terms.automaton is None


def build_tables(hmm: HMM, terms: Terms, horizon: int) -> Tables:
    """Run the backward recursion.

    L[0] = final; L[r, q] = transition @ (sum over q' of weight(q, q') * L[r - 1, q']), where
    weight(q, q') is the expected weight of the tokens that move the automaton from q to q'. With
    D = 1 - L and loss = 1 - weight,
    D[r, q] = transition @ (loss + sum over q' of weight(q, q') D[r - 1, q']).
    """
    one_minus = stores_one_minus(terms)
    token = _expected_weights(hmm, terms)
    successors = _successors(hmm, terms, token)
    final_weights = (
        torch.ones(len(terms), 1) if terms.automaton is None else terms.automaton.final_weights
    )
    first = (1 - final_weights if one_minus else final_weights).to(token.weights)
    values = first.new_empty(horizon + 1, *first.shape, hmm.num_states)
    log_scales = values.new_zeros(values.shape[:3], dtype=torch.float64)
    values[0] = first.unsqueeze(-1)
    if not one_minus:
        _rescale_(values[0], log_scales[0])
    for remaining in range(1, horizon + 1):
        for state, (targets, expected_weights) in enumerate(successors):
            scales = log_scales[remaining - 1][:, targets]  # (K, D)
            largest = scales.max(1, keepdim=True).values
            if len(targets) > 1:
                relative = (scales - largest).exp().to(expected_weights).unsqueeze(-1)
                expected_weights = expected_weights * relative
            expected = (expected_weights * values[remaining - 1][:, targets]).sum(1)
            values[remaining, :, state] = expected + token.loss if one_minus else expected
            log_scales[remaining, :, state] = largest[:, 0] + token.log_scale
        values[remaining] = hmm.transition.expect(values[remaining]).clamp_min_(0.0)
        if one_minus:
            values[remaining].clamp_max_(1.0)
        else:
            _rescale_(values[remaining], log_scales[remaining])
    return Tables(values, log_scales, torch.zeros_like(log_scales))


def with_missing(hmm: HMM, terms: Terms, tables: Tables) -> Tables:
    """Return tables that know how probable it is that required text still comes.

    That is M[r, q] / max over q' of M[r, q'] while text is missing. M[r, q] is the expected weight
    of r more tokens from the automaton state q, on average over HMM states.
    """
    automaton = terms.automaton
    if automaton is None or not automaton.requires_text(hmm.vocab_size):
        return tables
    belief, mean_belief = hmm.initial[None], torch.zeros_like(hmm.initial)
    for _ in range(BELIEF_STEPS):
        mean_belief += belief[0] / BELIEF_STEPS
        belief = hmm.transition.predict(belief)
    terms_mean = (tables.values @ mean_belief.to(tables.values)).double().log() + tables.log_scales
    largest = terms_mean.amax(1, keepdim=True).clamp_min(LOG_ZERO)
    coefficients = terms.coefficients.to(terms_mean)[:, None]
    mean = (coefficients * (terms_mean - largest).exp()).sum(1).clamp_min(0.0).log()
    mean += largest[:, 0]  # (horizon + 1, Q)
    log_ratio = mean - mean.amax(1, keepdim=True).clamp_min(LOG_ZERO)
    missing = (automaton.min_tokens(hmm.vocab_size) > 0).to(hmm.device)
    log_ratio.masked_fill_(~missing | log_ratio.isneginf(), 0.0)
    return tables._replace(log_missing=log_ratio[:, None].expand_as(tables.log_scales).contiguous())


class ExpectedWeights(NamedTuple):
    """The expected weight of a token, by HMM state: `weights * exp(log_scale)`."""

    weights: Tensor  # (K, h)
    loss: Tensor  # (K, h): 1 minus the weight, without cancellation
    log_scale: float  # the largest log-weight of a token, if it is above 0


def _expected_weights(hmm: HMM, terms: Terms) -> ExpectedWeights:
    """Compute the expected weight of a token in every HMM state."""
    if stores_one_minus(terms):
        tokens = terms.tokens.to(hmm.device, torch.long)
        losses = (-terms.log_weights.double().expm1()).to(hmm.initial)  # without cancellation
        loss = hmm.emission.expect(losses, tokens).clamp(0.0, 1.0)
        return ExpectedWeights(1 - loss, loss, 0.0)
    log_scale = float(terms.log_weights.max().clamp_min(0.0)) if len(terms.tokens) else 0.0
    weights = hmm.emission.expect(*_all_weights(hmm, terms, log_scale))
    return ExpectedWeights(weights, torch.zeros_like(weights), log_scale)


def _all_weights(
    hmm: HMM, terms: Terms, log_scale: float, excluded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the scaled weights of all tokens, (K, V), and these tokens, (V,).

    Sums of positive numbers keep their digits, while differences from a sum may lose all of them
    where weights differ by orders of magnitude. Excluded tokens get weight 0.
    """
    log_weights = torch.zeros(len(terms), hmm.vocab_size, dtype=torch.float64)
    log_weights[:, terms.tokens.long()] = terms.log_weights.double()
    weights = (log_weights - log_scale).exp()
    if excluded is not None:
        weights[:, excluded.long()] = 0.0
    return weights.to(hmm.initial), torch.arange(hmm.vocab_size, device=hmm.device)


def _rescale_(values: Tensor, log_scales: Tensor) -> None:
    """Make the largest value of every table 1: products of many weights leave float32's range."""
    largest = values.amax(-1)
    values.div_(torch.where(largest > 0, largest, 1.0).unsqueeze(-1))
    log_scales.add_(largest.double().log()).clamp_min_(LOG_ZERO)


def _successors(hmm: HMM, terms: Terms, token: ExpectedWeights) -> list[Successors]:
    """Return the successors of each automaton state; classes with one target are summed."""
    if terms.automaton is None:
        return [Successors(torch.zeros(1, dtype=torch.long), token.weights.unsqueeze(1))]
    dfa, like = terms.automaton.dfa, token.weights
    class_weights = like.new_zeros(len(terms), dfa.transitions.shape[1], hmm.num_states)
    others = _all_weights(hmm, terms, token.log_scale, excluded=dfa.tokens)
    class_weights[:, 0] = hmm.emission.expect(*others)
    token_weights = _all_weights(hmm, terms, token.log_scale)[0][
        :, dfa.tokens.to(hmm.device).long()
    ]
    for token_class in range(1, class_weights.shape[1]):
        mask = dfa.classes == token_class
        tokens = dfa.tokens[mask].to(hmm.device, torch.long)
        expected = hmm.emission.expect(token_weights[:, mask].contiguous(), tokens)
        class_weights[:, token_class] = expected
    successors = []
    for transitions in dfa.transitions.long():
        targets, target_index = torch.unique(transitions, return_inverse=True)
        weights = class_weights.new_zeros(len(terms), len(targets), hmm.num_states)
        weights.index_add_(1, target_index.to(like.device), class_weights)
        successors.append(Successors(targets, weights))
    return successors
