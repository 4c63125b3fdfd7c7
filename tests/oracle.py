"""Steering of one row by its definition, in float64: every future of the HMM is enumerated.

It imports nothing of what it checks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log

import torch
from torch import Tensor

from foretrace.attribute import Attribute, LogitAffine
from foretrace.hmm import HMM

FORBIDDEN_END = -1e30  # a logit that is finite, so that a row can still end


@dataclass
class Row:
    """A sequence to steer: its goal, its limits and its tokens."""

    hmm: HMM
    factors: Sequence[tuple[Attribute, LogitAffine]]
    generated: Sequence[int]
    limit: int
    prompt: Sequence[int] = ()
    table_horizon: int = 64
    horizon: int = 1 << 40
    stop_ids: Sequence[int] = ()
    neutral_end: bool = True
    begin: int | None = 0
    end: int | None = None
    max_price: float = 1.0
    head: Tensor | None = None
    """The matrix that makes the LM's logits, (V, d)."""
    state: Tensor | None = None
    """The LM's last hidden state, (d,); None if it is not readable."""
    is_limited: bool = False
    """Whether the last step has reached the largest price."""

    def steer(self, logits: Tensor) -> Tensor:
        """Return the steered logits of the next token: (V or more,) -> the same, float64."""
        bare, count = logits.double(), len(self.generated)
        if self.begin is None or not self.begin <= count < (self.end or inf):
            return bare
        if self.limit - self.begin < max(self._min_tokens(one, 0) for one, _ in self.factors):
            return bare
        known = self.hmm.vocab_size
        steered = torch.full_like(bare, -inf)
        steered[:known] = bare[:known]
        stops = [token for token in self.stop_ids if token < len(bare)]
        steered[stops] = bare[stops]
        forbidden_ends = set[int]()
        for attribute, transform in self.factors:
            for token in range(known):
                steered[token] += self._log_factor(attribute, transform, token)
                steered[token] += self._context_reward(attribute, token)
            for token in stops:
                if self._min_tokens(attribute, self._state(attribute, [token])) > 0:
                    forbidden_ends.add(token)
        steered[list(forbidden_ends)] = FORBIDDEN_END
        unknown = [token for token in stops if token >= known]
        possible = steered.clone()
        steered[unknown] = -inf
        is_required = any(self._min_tokens(one, 0) > 0 for one, _ in self.factors)
        if not is_required and any(
            attribute.context is not None or any(one.first_only for one in attribute.evidence)
            for attribute, _ in self.factors
        ):
            steered = self._limited(bare, steered)
        if self.neutral_end:
            neutral = [token for token in stops if possible[token] > FORBIDDEN_END]
            others = [token for token in range(len(bare)) if token not in stops]
            change = steered[others].logsumexp(0) - bare[others].logsumexp(0)
            steered[neutral] = bare[neutral] + torch.nan_to_num(change, 0.0, 0.0, 0.0)
        return steered

    def _inside(self) -> list[int]:
        assert self.begin is not None
        return [token for token in self.generated[self.begin :] if token < self.hmm.vocab_size]

    def _state(self, attribute: Attribute, more: Sequence[int]) -> int:
        """Return the automaton state after the tokens in the window and some more."""
        state, automaton = 0, attribute.terms.automaton
        for token in (*self._inside(), *more):
            is_neutral = token in self.hmm.config.eos_token_ids or token >= self.hmm.vocab_size
            if automaton is not None and not is_neutral:
                state = int(automaton.dfa.step(torch.tensor([state]), torch.tensor([token])))
        return state

    def _min_tokens(self, attribute: Attribute, state: int) -> float:
        """Return the fewest tokens from an automaton state to an accepting one."""
        automaton, reached = attribute.terms.automaton, {state}
        if automaton is None:
            return 0
        ends = self.hmm.config.eos_token_ids
        tokens = [token for token in range(self.hmm.vocab_size) if token not in ends]
        for count in range(automaton.dfa.num_states + 1):
            if any(bool((automaton.final_weights[:, one] > 0).any()) for one in reached):
                return count
            pairs = torch.tensor(list(itertools.product(reached, tokens)))
            reached = set(automaton.dfa.step(pairs[:, 0], pairs[:, 1]).tolist())
        return inf

    def _log_factor(self, attribute: Attribute, transform: LogitAffine, token: int) -> float:
        assert self.begin is not None
        allowed = max(0, min(self.limit, self.end or self.limit) - len(self.generated) - 1)
        if self._min_tokens(attribute, self._state(attribute, [token])) > allowed:
            return -inf
        ahead = allowed if attribute.terms.automaton is not None else min(allowed, self.horizon)
        ahead = min(ahead, self.table_horizon)
        predicted = self._predicted([*self.prompt, *self.generated])
        joint = total = 0.0
        for future in itertools.product(range(self.hmm.vocab_size), repeat=ahead):
            probability = self._probability(predicted, [token, *future])
            total += probability
            joint += probability * self._weight(attribute, [token, *future])
        eap = max(joint / total, 1e-30)  # what the HMM cannot do is improbable, not forbidden
        if transform == LogitAffine():
            return log(eap)
        logit = transform.scale * (log(eap) - log(max(1 - eap, 1e-30))) + transform.shift
        return -log(1 + exp(-logit))

    def _context_reward(self, attribute: Attribute, token: int) -> float:
        context, ends = attribute.context, self.hmm.config.eos_token_ids
        if context is None or self.state is None or self.head is None or token in ends:
            return 0.0
        head, known = self.head.double(), torch.cat([self.state.double(), torch.ones(1)])
        feature = head[token] - head.mean(0)
        pairs = zip(context.readers.double(), context.writers.double(), strict=True)
        return float(sum((reader @ known) * (writer @ feature) for reader, writer in pairs))

    def _weight(self, attribute: Attribute, more: Sequence[int]) -> float:
        """Return the weight of the text in the window with more tokens: (sum of) products."""
        terms, ends = attribute.terms, self.hmm.config.eos_token_ids
        seen = self._inside()
        text = [token for token in (*seen, *more) if token not in ends]
        values = terms.coefficients * terms.weights(torch.tensor(text).long()).prod(1)
        if terms.automaton is not None:
            values = values * terms.automaton.final_weights[:, self._state(attribute, more)]
        value = float(values.sum())
        for evidence in attribute.evidence:
            rewards = dict(zip(evidence.tokens.tolist(), evidence.rewards.tolist(), strict=True))
            counted = list(more)
            if evidence.first_only and more[0] in seen:
                counted = list(more[1:])  # a token that was generated before is not rewarded again
            value *= exp(sum(rewards.get(one, 0.0) for one in counted if one not in ends))
        return value

    def _predicted(self, tokens: Sequence[int]) -> Tensor:
        predicted, ends = self.hmm.initial.double(), self.hmm.config.eos_token_ids
        last = max((at for at, one in enumerate(self.prompt) if one in ends), default=-1)
        for token in tokens[last + 1 :]:  # a prompt begins after its last end of text
            if token < self.hmm.vocab_size:
                belief = predicted * self.hmm.emission.of_tokens(torch.tensor([token]))[0].double()
                predicted = self._transition(belief / belief.sum())
        return predicted

    def _transition(self, belief: Tensor) -> Tensor:
        return self.hmm.transition.predict(belief.to(self.hmm.initial)[None])[0].double()

    def _probability(self, predicted: Tensor, tokens: Sequence[int]) -> float:
        forward = predicted
        for token in tokens:
            joint = forward * self.hmm.emission.of_tokens(torch.tensor([token]))[0].double()
            forward = self._transition(joint)
        return float(joint.sum())

    def _limited(self, bare: Tensor, steered: Tensor) -> Tensor:
        """Lower the strength so that the step costs `max_price` nats, by bisection."""
        factors = steered - bare
        is_free = factors > -9e3

        def at(share: float) -> Tensor:
            return torch.where(is_free, bare + share * factors.nan_to_num(0.0), steered)

        if price(bare, at(1.0)) <= self.max_price:
            return steered
        low, high = 0.0, 1.0
        self.is_limited = True
        for _ in range(60):
            middle = (low + high) / 2
            cheap = price(bare, at(middle)) <= self.max_price
            low, high = (middle, high) if cheap else (low, middle)
        return at(low)


def price(bare: Tensor, steered: Tensor) -> float:
    """Return KL(steered || bare) in nats: (V,), (V,) logits."""
    log_p, log_q = steered.double().log_softmax(0), bare.double().log_softmax(0)
    return float((log_p.exp() * (log_p - log_q)).nansum())
