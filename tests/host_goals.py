"""Goals of every kind, for the tests of engines on the host."""

import torch

from foretrace.attribute import Attribute
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal, Compiler, Goal

KINDS = ("product", "rewards", "two goals", "required text")


def goal_of(kind: str, hmm: HMM, horizon: int) -> CompiledGoal:
    """Return a goal of a kind; the tokens 1 and 2 are "a" and "b"."""
    vocab = hmm.vocab_size
    first, second = torch.rand(2, vocab, generator=torch.Generator().manual_seed(0))
    text = Attribute.contains("ab", [b"", b"a", b"b", *[b""] * (vocab - 3)])
    attributes = {
        "product": [Attribute.from_weights(first)],
        "rewards": [Attribute.from_rewards(first - 0.5)],
        "two goals": [Attribute.from_weights(first), Attribute.from_rewards(second - 0.5)],
        "required text": [text & Attribute.from_weights(second)],
    }
    return Compiler(hmm, horizon).compile([Goal(one, 2.0) for one in attributes[kind]])
