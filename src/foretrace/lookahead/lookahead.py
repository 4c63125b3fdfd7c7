"""What the future holds: the expected weight of all that may follow, by state and tokens left."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.attribute.lookup import lookup
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.device_automaton import Reading
from foretrace.lookahead.eap import Future, Kind, Weighing, expect
from foretrace.lookahead.tables import Tables, build, complements
from foretrace.vocabulary import require_same_fingerprint


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Lookahead:
    """Backward tables of an attribute under an HMM, frozen: rows and requests share one.

    `tables.values[r, k, q, z]` tells of term k over r tokens to come, given the state z before them
    and that of the attribute's automaton, q: the expected product of their weights, times what it
    is worth to end as they do, eq. (backward); where coefficients have both signs, 1 minus that, so
    that small differences keep their digits. It is indexed by what remains: the HMM is homogeneous,
    and one table serves every length. A horizon of 0 weighs the next token alone.
    """

    hmm: HMM
    attribute: Attribute
    horizon: int
    terms: Terms  # those of the attribute; end of text has no weight
    coefficients: Tensor  # (K,) float64, on the HMM's device, as what follows
    tokens: Tensor  # (M,) that have a weight, rising
    own: Tensor  # (K, V): every token's weight; where coefficients have both signs, 1 minus it
    tables: Tables
    reading: Reading | None  # where next tokens lead the attribute's automaton, if it has one
    _log_weights: Tensor  # (M, K) float64
    _fewest: int  # tokens that it takes at least

    def __init__(
        self,
        hmm: HMM,
        attribute: Attribute,
        horizon: int = 64,
        *,
        tables: Tables | None = None,
    ) -> None:
        """Build the tables, or take those that were built before of the same parts."""
        require_same_fingerprint(
            f"The attribute '{attribute.name}'",
            attribute.config.tokenizer_fingerprint,
            hmm.config.tokenizer_fingerprint,
        )
        terms = _within(attribute, hmm)
        if len(terms.tokens) and int(terms.tokens[-1]) >= hmm.vocab_size:
            raise InvalidInputError(
                f"'{attribute.name}' weighs token {int(terms.tokens[-1])}, but the HMM has a "
                f"vocabulary of {hmm.vocab_size}. Fit it with the tokenizer of the HMM's LM."
            )
        if horizon < 0:
            raise InvalidInputError(f"A horizon has 0 tokens or more, not {horizon}.")
        if not len(terms):
            raise InvalidInputError(
                f"'{attribute.name}' is never true of any text: nothing can be steered toward it."
            )
        tokens = terms.tokens.to(hmm.device, torch.long)
        log_weights = terms.log_weights.double()
        lost = (-log_weights.expm1()).to(hmm.initial)  # 1 - w, to the last digit
        complement = complements(terms)
        own = lost.new_full((len(terms), hmm.vocab_size), 0.0 if complement else 1.0)
        own[:, tokens] = lost if complement else log_weights.exp().to(own)
        if tables is None:
            expected = hmm.emission.expect(lost, tokens).clamp(0.0, 1.0)  # (K, h)
            tables = build(hmm, terms, expected, horizon)
        reading = None if terms.memory is None else Reading.of(terms.memory, hmm)
        parts = {
            "hmm": hmm,
            "attribute": attribute,
            "horizon": horizon,
            "terms": terms,
            "coefficients": terms.coefficients.to(hmm.device),
            "tokens": tokens,
            "_log_weights": log_weights.T.contiguous().to(hmm.device),
            "own": own,
            "tables": Tables(*(part.to(hmm.device) for part in tables)),
            "reading": reading,
            "_fewest": 0 if reading is None else int(reading.fewest[0]),
        }
        for name, part in parts.items():
            object.__setattr__(self, name, part)

    def __repr__(self) -> str:
        return f"Lookahead({self.attribute.name}, {len(self.terms)} terms, {self.horizon} tokens)"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside the HMM."""
        parts = (*self.tables, self.own, self.tokens, self._log_weights)
        own = 0 if self.reading is None else self.reading.nbytes
        return own + sum(part.nbytes for part in parts)

    @property
    def remembered(self) -> Reading:
        """What steering has to know of the automaton, where there is one."""
        assert self.reading is not None
        return self.reading

    @property
    def kind(self) -> Kind:
        """What decides how its expectations are computed."""
        return Kind(len(self.terms), complements(self.terms))

    def ahead(self, remaining: int, states: Tensor | int = 0) -> Tensor:
        """Give tables for so many tokens to come, at most the horizon: (K, h), or (K, D, h)."""
        return self.tables.values[min(remaining, self.horizon)][:, states]

    def log_scale(self, remaining: int, states: Tensor | int = 0) -> Tensor:
        """Give the logarithms of what these are to be multiplied by: (K,), or (K, D), float64."""
        return self.tables.log_scales[min(remaining, self.horizon)][:, states]

    def require_room(self, limit: int) -> None:
        """Raise unless so many tokens can have the attribute, whatever is left to chance."""
        if self._fewest > limit:
            raise InvalidInputError(
                f"'{self.attribute.name}' takes {self._fewest} tokens at least, and the text may "
                f"have {limit}. Let it be longer."
            )

    def log_weights(self, tokens: Tensor) -> Tensor:
        """Give the log-weights of tokens, of every term: (...) ids -> (..., K) float64."""
        if not len(self.tokens):
            return self.coefficients.new_zeros(*tokens.shape, len(self.terms))
        place, found = lookup(self.tokens, tokens)
        return torch.where(found.unsqueeze(-1), self._log_weights[place], 0.0)

    def eap(self, prefix: Tensor, remaining: int) -> Tensor:
        """Give the EAP of every next token after a 1-D prefix; `remaining` follow it: (V,).

        Weights of the prefix do not count: it is the prompt.
        """
        predicted = self.predicted(prefix)
        if self.reading is None:
            return self._eap(predicted, remaining, 0)
        every = torch.arange(self.hmm.vocab_size, device=self.hmm.device)
        after = self.reading.after(torch.zeros_like(every), every)
        eap = predicted.new_zeros(self.hmm.vocab_size)
        for target in torch.unique(after).tolist():
            eap = torch.where(after == target, self._eap(predicted, remaining, target), eap)
        return eap

    def _eap(self, predicted: Tensor, remaining: int, state: int) -> Tensor:
        """Give the EAP of next tokens as if all of them led to this state: (1, h) -> (V,)."""
        weighted = predicted * self.ahead(remaining, state)  # (K, h)
        product = self.hmm.emission.predict(torch.cat([predicted, weighted])).T  # (V, 1 + K)
        joint, probability = product[:, 1:].unsqueeze(-1), product[:, :1]
        future = Future(joint, probability, weighted.sum(-1, keepdim=True))
        past, only = self.log_scale(remaining, state)[:, None], torch.zeros(1, dtype=torch.long)
        weighing = Weighing(self.coefficients[:, None], past, [self.own], only)
        eap = expect(self.kind, future, weighing, slice(0, self.hmm.vocab_size))
        return (eap.share * eap.log_size.exp())[:, 0].clamp_max_(1.0)

    def predicted(self, prefix: Tensor) -> Tensor:
        """Give the distribution of the next state after a 1-D prefix, or at the start: (1, h)."""
        if not len(prefix):
            return self.hmm.initial[None]
        *_, last = inference.scan(self.hmm, prefix[None].to(self.hmm.device))
        return last.predicted


def _within(attribute: Attribute, hmm: HMM) -> Terms:
    """Give the terms as the HMM's texts need them: their ends, and unknown tokens, say nothing."""
    terms, known = attribute.terms, attribute.config.vocab_size
    passed_by = list(hmm.config.eos_token_ids)
    if terms.memory is None:
        return terms.without(passed_by)
    passed_by += range(known or hmm.vocab_size, hmm.vocab_size)
    return terms.without(passed_by).reading_below(hmm.vocab_size)
