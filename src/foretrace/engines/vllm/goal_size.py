"""The size of a request's goals, computed without their tables, and its limits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import NamedTuple, Self

import torch

from foretrace.attribute import Attribute, AttributeConfig
from foretrace.attribute.evidence import Evidence
from foretrace.engines.vllm.params import GoalParams, SteeringParams
from foretrace.errors import InvalidInputError
from foretrace.steering.request import require_no_text, require_single_constraint

MAX_TERMS = 16  # of all goals of a request: each costs a table, and its share of every step
MAX_STATES, MAX_TABLES = 64, 256  # of a goal's automaton, and of that times the goal's terms


class GoalSize(NamedTuple):
    """The cost of a goal, and what its attribute consists of."""

    terms: int
    min_tokens: int | None
    """Tokens that the shortest text with the attribute has; None if no text is required."""
    has_evidence: bool
    requires_text: bool = False
    """Whether a text can lack what is required, and get it with more tokens."""

    @classmethod
    def from_attribute(cls, attribute: Attribute, vocab_size: int) -> Self:
        """Return the size of a goal from its attribute, over a vocabulary of so many tokens."""
        terms, automaton = attribute.terms, attribute.terms.automaton
        min_tokens = None if automaton is None else int(automaton.min_tokens(vocab_size)[0])
        requires_text = automaton is not None and automaton.requires_text(vocab_size)
        return cls(len(terms), min_tokens, bool(attribute.evidence), requires_text)


def check_sizes(params: SteeringParams, sizes: Sequence[GoalSize], limit: int | None) -> None:
    """Raise if goals have too many terms, too few tokens to be met, or transforms of evidence.

    Args:
        params: The goals of a request.
        sizes: The size of each goal.
        limit: The maximum number of tokens of the text.
    """
    _require_few_terms(sum(size.terms for size in sizes))
    for goal, size in zip(params.goals, sizes, strict=True):
        _require_transformable(goal, size.has_evidence)
    if isinstance(params.window, str):
        require_no_text(any(size.requires_text for size in sizes))
    elif params.window is not None:
        limit = params.window if limit is None else min(limit, params.window)
    required = [size.min_tokens for size in sizes if size.min_tokens is not None]
    require_single_constraint(len(required))
    if limit is not None and required and required[0] > limit:
        raise InvalidInputError(
            f"The required texts take {required[0]} tokens at least, but the text may have "
            f"{limit}. Raise max_tokens, or the window."
        )


def require_small(goals: Sequence[GoalParams], load: Callable[[str], Attribute]) -> None:
    """Raise if goals would cost too much, before anything of their size is computed.

    The goals are built over an alphabet of bytes instead of the vocabulary. An automaton over
    tokens has no more states than the one over bytes, and the terms are the same.

    Args:
        goals: The goals of a request.
        load: Returns the attribute of a name.

    Raises:
        InvalidInputError: The goals are too large, or cannot be combined.
    """
    terms = 0
    for goal in goals:
        small = _over_bytes(goal, load)
        _require_transformable(goal, bool(small.evidence))
        states, count = small.terms.num_states, len(small.terms)
        if small.evidence and not small.terms.is_product:
            raise InvalidInputError(
                f"{small.name} combines evidence with a sum of {count} products. Combine evidence "
                f"with single products, required and forbidden texts, and other evidence only."
            )
        if states > MAX_STATES or states * count > MAX_TABLES:
            raise InvalidInputError(
                f"The required and forbidden texts need an automaton of {states} states "
                f"for each of {count} terms. At most {MAX_STATES} states are allowed, and "
                f"{MAX_TABLES} for all terms together. Use fewer or shorter texts, or fewer "
                f"attributes."
            )
        terms += count
    _require_few_terms(terms)


BYTES = [bytes([value]) for value in range(256)]
"""A vocabulary of single bytes."""


def _over_bytes(goal: GoalParams, load: Callable[[str], Attribute]) -> Attribute:
    """Build the conjunction of a goal over bytes, with strength 1 of all operands.

    A power does not change the number of terms. It raises an error if the operand has none.
    """
    attributes = {name: _stand_in(index, name, load(name)) for index, name in enumerate(goal.names)}
    factors = []
    for operand in goal.operands:
        factor = operand.expression.build(
            attributes, lambda operand: Attribute.contains(operand.texts, BYTES)
        )
        if operand.strength is not None:
            _ = factor**operand.strength
        factors.append(factor)
    return reduce(and_, factors)


def _stand_in(index: int, name: str, attribute: Attribute) -> Attribute:
    """Return an attribute over bytes whose terms and evidence combine as another's do.

    Its one token has a random integer as log-weight in each term: sums of these are exact, and
    equal only where the same terms were multiplied. A constant term stays constant.
    """
    terms = attribute.terms
    generator = torch.Generator().manual_seed(index)
    random = torch.randint(1, 1 << 40, (len(terms), 1), generator=generator).double()
    constant = (terms.log_weights == 0).all(1, keepdim=True)
    token = torch.tensor([index], dtype=torch.int32)
    log_weights = torch.where(constant, 0.0, -random)
    if bool(constant.all()):  # as the terms of evidence alone
        token, log_weights = token[:0], log_weights[:, :0]
    evidence = Evidence(0.0, token, torch.ones(len(token), dtype=torch.float64))
    return Attribute(
        replace(terms, tokens=token, log_weights=log_weights),
        AttributeConfig(name),
        (evidence,) * len(attribute.evidence),
    )


def _require_transformable(goal: GoalParams, has_evidence: bool) -> None:
    if has_evidence and not goal.transform.is_identity:
        raise InvalidInputError(
            f"A transform applies to probabilities, and {', '.join(goal.names)} has evidence. "
            f"Steer toward it by strength or level."
        )


def _require_few_terms(count: int) -> None:
    if count > MAX_TERMS:
        raise InvalidInputError(
            f"The goals of this request have {count} terms, but {MAX_TERMS} are allowed. Use fewer "
            f"attributes."
        )
