"""Steering in dense arithmetic, for attributes that say more than products of token weights do.

p(s | x) is the expectation, over the HMM's state paths z given the text x, of the product over all
places i of w(x_i) u(z_i) v(q_i): a weight of the token, one of the state, and one of where an
automaton of phrases arrives. With u = v = 1 it is what foretrace serves.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from candidates.phrases import Phrases
from foretrace.hmm import HMM

LEAST = 1e-30


@dataclass(frozen=True)
class Dense:
    """The tables of an HMM, written out."""

    initial: Tensor  # (h,)
    transition: Tensor  # (h, h)
    emission: Tensor  # (h, V)

    @classmethod
    def of(cls, hmm: HMM) -> Self:
        """Write out."""
        identity = torch.eye(hmm.num_states, dtype=hmm.initial.dtype)
        return cls(hmm.initial, hmm.transition.predict(identity), hmm.emission.predict(identity))


@dataclass(frozen=True)
class Weights:
    """What an attribute says."""

    tokens: Tensor  # (V,): w
    states: Tensor | None = None  # (h,): u
    phrases: Phrases = field(default_factory=Phrases)
    absent: bool = False
    """The attribute is that all this is not so."""


@dataclass(frozen=True)
class Beliefs:
    """What is known of some texts."""

    plain: Tensor  # (n, h): p(next state | text)
    weighted: Tensor  # (n, h): the same, each path by its weight so far; `past` has the size
    past: Tensor  # (n,): log
    place: Tensor  # (n,): of the automaton

    @classmethod
    def before(cls, predicted: Tensor) -> Self:
        """Begin, after prompts: weights of these do not count."""
        count = len(predicted)
        nowhere = torch.zeros(count, dtype=torch.long)
        return cls(predicted, predicted, predicted.new_zeros(count), nowhere)


class Reference:
    """An attribute beside an HMM."""

    def __init__(self, dense: Dense, weights: Weights, horizon: int) -> None:
        self.dense, self.weights, self.horizon = dense, weights, horizon
        self.states = 1.0 if weights.states is None else weights.states
        self.tables = self._tables()

    def _tables(self) -> Tensor:
        """Walk backward: (horizon + 1, Q, h), of what is worth to have arrived in q."""
        phrases, dense = self.weights.phrases, self.dense
        weighed = dense.emission * self.weights.tokens
        known = weighed[:, phrases.tokens].T  # (M, h)
        others = weighed.sum(1) - known.sum(0)
        worth = phrases.arrivals.to(others)[:, None]
        tables = [worth.expand(-1, len(others))]
        for _ in range(self.horizon):
            inner = others * tables[-1][phrases.others]  # (Q, h)
            for place, targets in enumerate(phrases.moves):
                inner[place] += (known * tables[-1][targets]).sum(0)
            tables.append(worth * ((self.states * inner) @ dense.transition.T))
        return torch.stack(tables)

    def log_eap(self, beliefs: Beliefs, remaining: int) -> Tensor:
        """Give the logarithm of the EAP of every next token: (n, V)."""
        table = self.tables[min(remaining, self.horizon)]  # (Q, h)
        phrases, emission = self.weights.phrases, self.dense.emission
        weighted = beliefs.weighted * self.states
        joint = (weighted * table[phrases.others[beliefs.place]]) @ emission
        targets = phrases.moves[beliefs.place]  # (n, M)
        if targets.shape[1]:
            known = emission[:, phrases.tokens].T  # (M, h)
            for row, own in enumerate(targets):
                joint[row, phrases.tokens] = (known * table[own]) @ weighted[row]
        joint.mul_(self.weights.tokens).div_((beliefs.plain @ emission).clamp_min_(LEAST))
        product = (joint.clamp_min_(LEAST).log_() + beliefs.past[:, None]).clamp_max_(-1e-7)
        return torch.log(-product.expm1()) if self.weights.absent else product

    def ahead(self, beliefs: Beliefs, tokens: Tensor, later: int) -> Tensor:
        """Give the expected weight of so many tokens after these, (n,) ids: (n,)."""
        seen = beliefs.weighted * self.dense.emission[:, tokens].T * self.states
        place = self.weights.phrases.after(beliefs.place, tokens)
        own = self.weights.phrases.arrivals.to(seen)[place]  # which the table has in it
        total = seen.sum(1).clamp_min(LEAST)
        return (seen * self.tables[later][place]).sum(1) / total / own

    def advance(self, beliefs: Beliefs, tokens: Tensor) -> Beliefs:
        """Take one more token of each text into account: (n,) ids."""
        emission = self.dense.emission[:, tokens].T  # (n, h)
        plain, weighted = beliefs.plain * emission, beliefs.weighted * emission * self.states
        seen = plain.sum(1, keepdim=True).clamp_min(LEAST)
        size = (weighted.sum(1, keepdim=True) / seen).clamp_min(LEAST)
        place = self.weights.phrases.after(beliefs.place, tokens)
        worth = self.weights.tokens[tokens] * self.weights.phrases.arrivals.to(size)[place]
        return Beliefs(
            (plain / seen) @ self.dense.transition,
            (weighted / seen / size) @ self.dense.transition,
            beliefs.past + size[:, 0].log() + worth.clamp_min(LEAST).log(),
            place,
        )


def reconsidered(beliefs: Beliefs, factors: Tensor) -> Beliefs:
    """Multiply what is believed of states, as evidence does: (n, h)."""
    plain = beliefs.plain * factors
    total = plain.sum(1, keepdim=True).clamp_min(LEAST)
    return replace(beliefs, plain=plain / total, weighted=beliefs.weighted * factors / total)
