"""The arithmetic of the expected attribute probability (EAP): eq. (EAP).

`Lookahead.eap` uses these functions for one row, and `steering` for all rows of a batch.

A *column* is one term of one goal of one row. Goals are sorted by kind, and columns by goal, so
that each kind is a slice. Shapes: n rows, G goals, C columns, b tokens of a block.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.attribute.terms import Terms
from foretrace.hmm import inference
from foretrace.lookahead.tables import LOG_ZERO, stores_one_minus


class EapKind(IntEnum):
    """How the EAP of a goal is computed from its terms."""

    LOGARITHMIC = 0
    """One term. Its token weights are logarithms, because they may differ vastly."""
    LINEAR = 1
    """A sum of terms."""
    ONE_MINUS = 2
    """A sum of terms of both signs. Tables and token weights hold 1 minus the weight."""

    @classmethod
    def of(cls, terms: Terms) -> "EapKind":
        """Return the kind of an attribute's terms."""
        if stores_one_minus(terms):
            return cls.ONE_MINUS
        return cls.LOGARITHMIC if len(terms) == 1 else cls.LINEAR


class GoalGroup(NamedTuple):
    """The goals of one kind, with or without transforms: slices of all goals and columns."""

    kind: EapKind
    is_transformed: bool
    goals: slice
    columns: slice


class ScaledTerms(NamedTuple):
    """Coefficients times the weights of past tokens, relative to a scale for each goal."""

    coefficients: Tensor  # (C,) float64, divided by exp(log_scale)
    sums: Tensor  # (G,) float64: their sums over the terms of a goal
    log_scale: Tensor  # (G,) float64: logarithm of the factor that all next tokens share


def scale_terms(
    groups: Sequence[GoalGroup],
    goals: Tensor,
    num_goals: int,
    coefficients: Tensor,
    log_coefficients: Tensor,
    log_past: Tensor,
) -> ScaledTerms:
    """Scale the terms of every goal by its largest one, so that no sum underflows.

    Args:
        groups: The kinds of goals that occur.
        goals: The goal of each column, (C,).
        num_goals: G.
        coefficients: The coefficient of each column, (C,) float64.
        log_coefficients: Their logarithms for single terms, 0 for terms of sums, (C,) float64.
        log_past: The log-weights of past tokens plus the log-scale of the table, (C,) float64.
    """
    log_term = log_past + log_coefficients
    if all(group.kind == EapKind.LOGARITHMIC for group in groups):
        return ScaledTerms(coefficients, coefficients, log_term.clamp_min_(LOG_ZERO))
    log_scale = log_past.new_full((num_goals,), LOG_ZERO)
    log_scale = log_scale.scatter_reduce(0, goals, log_term, "amax")
    relative = log_past - log_scale[goals]
    # Sums of differences from the largest term are accurate where terms cancel.
    sums, rest = (
        torch.zeros_like(log_scale).index_add_(0, goals, part)
        for part in (coefficients, coefficients * relative.expm1())
    )
    return ScaledTerms(coefficients * relative.exp(), sums + rest, log_scale)


def expected_weight_(joint: Tensor, average: Tensor, probability: Tensor) -> Tensor:
    """Divide the joint expectation of a token and its future by the token's probability, in place.

    Args:
        joint: sum_z predicted[z] emission[x, z] table[z] of every column, (C, b). Overwritten.
        average: The sum of `joint` over all tokens, (C, 1). Tokens that no state emits take it.
        probability: The token's probability plus `inference.IMPOSSIBLE`, (C, b).
    """
    return joint.add_(average, alpha=inference.IMPOSSIBLE).div_(probability)


def log_eap_(
    group: GoalGroup, ratio: Tensor, weights: Tensor, terms: ScaledTerms, goals: Tensor
) -> Tensor:
    """Compute the logarithm of the EAP of one kind of goals, less `log_scale`: (G', b).

    Args:
        group: The kind, and which of all goals and columns are of it.
        ratio: The result of `expected_weight_` for the columns of this kind, (C', b). Overwritten.
        weights: The token weights of these columns in the form of the kind, (C', b).
        terms: The scaled terms of all columns.
        goals: The goal of each column, (C,).
    """
    epsilon = inference.IMPOSSIBLE
    if group.kind == EapKind.LOGARITHMIC:
        return ratio.clamp_min_(epsilon).log_().add_(weights)
    if group.kind == EapKind.ONE_MINUS:  # 1 - w L = D + (1 - w) (1 - D), with D = 1 - L
        ratio.addcmul_(weights, 1 - ratio)
    else:
        ratio.mul_(weights)
    ratio.mul_(terms.coefficients[group.columns].to(ratio).unsqueeze(1))
    first, stop = group.goals.start, group.goals.stop
    index = goals[group.columns] - first
    total = ratio.new_zeros(stop - first, ratio.shape[1]).index_add_(0, index, ratio)
    if group.kind == EapKind.ONE_MINUS:
        total = terms.sums[group.goals].to(ratio).unsqueeze(1) - total
    return total.clamp_min_(epsilon).log_()
