"""Attributes over the vocabulary of tiny HMMs."""

import torch

from foretrace.attribute import Attribute
from foretrace.attribute.terms import Terms
from tiny import TOKENS

WEIGHTS = torch.tensor(
    [[0.5, 1.0, 0.25, 0.9], [1.0, 0.3, 0.75, 1.0], [0.2, 0.9, 1.0, 0.6]], dtype=torch.float64
)
SPELLED = (b"a", b"b", b"c", b"ab")


def attributes() -> dict[str, Attribute]:
    """Return a product, a mixture, an automaton, and combinations of them."""
    a, b, c = (Attribute.from_weights(row) for row in WEIGHTS)
    tokens = torch.arange(TOKENS, dtype=torch.int32)
    coefficients = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    mixture = Attribute(Terms(coefficients, tokens, WEIGHTS.log()))
    return {
        "one": a,
        "mixture": mixture,
        "and": a & b,
        "or": a | b,
        "not": ~a,
        "all": (a | ~b) & ~(c & mixture),
        "nothing to weigh": Attribute.from_weights(torch.ones(TOKENS)),
        **_with_automata(a, mixture),
    }


def _with_automata(a: Attribute, mixture: Attribute) -> dict[str, Attribute]:
    """Return constraints, alone and combined with token weights."""
    aba, bb = (Attribute.contains(text, SPELLED) for text in ("aba", "bb"))
    return {
        "must": aba,
        "must not": ~bb,
        "must and must not": aba & ~bb,
        "either": aba | bb,
        "weighed and must": a & aba,
        "mixed and must not": mixture & ~bb,
        "not weighed, and must": ~a & aba,
        "weighed or must": a | aba,
    }
