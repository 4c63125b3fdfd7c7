"""What the future holds: the expected weight of all that may follow, by state and tokens left."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.expectation import Future, Kind, Weighing, expect
from foretrace.vocabulary import require_same_fingerprint


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Lookahead:
    """Backward tables of an attribute under an HMM, frozen: rows and requests share one.

    `table[r, k, z]` tells of term k over r tokens to come, given the state z before them: the
    expected product of their weights, eq. (backward); where coefficients have both signs, 1 minus
    that, so that small differences keep their digits. It is indexed by what remains: the HMM is
    homogeneous, and one table serves every length. A horizon of 0 weighs the next token alone.
    """

    hmm: HMM
    attribute: Attribute
    horizon: int
    terms: Terms  # those of the attribute; end of text has no weight
    coefficients: Tensor  # (K,) float64, on the HMM's device, as what follows
    tokens: Tensor  # (M,) that have a weight, rising
    own: Tensor  # (K, V): every token's weight; where coefficients have both signs, 1 minus it
    table: Tensor  # (horizon + 1, K, h)
    _log_weights: Tensor  # (M, K) float64

    def __init__(
        self,
        hmm: HMM,
        attribute: Attribute,
        horizon: int = 64,
        *,
        table: Tensor | None = None,
    ) -> None:
        """Build the table, or take one that was built before of the same parts."""
        require_same_fingerprint(
            f"The attribute '{attribute.name}'",
            attribute.config.tokenizer_fingerprint,
            hmm.config.tokenizer_fingerprint,
        )
        terms = attribute.terms.without(hmm.config.eos_token_ids)
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
        own = lost.new_full((len(terms), hmm.vocab_size), 0.0 if terms.signed else 1.0)
        own[:, tokens] = lost if terms.signed else log_weights.exp().to(own)
        if table is None:
            table = _table(hmm, tokens, lost, horizon, signed=terms.signed)
        parts = {
            "hmm": hmm,
            "attribute": attribute,
            "horizon": horizon,
            "terms": terms,
            "coefficients": terms.coefficients.to(hmm.device),
            "tokens": tokens,
            "_log_weights": log_weights.T.contiguous().to(hmm.device),
            "own": own,
            "table": table.to(hmm.device),
        }
        for name, part in parts.items():
            object.__setattr__(self, name, part)

    def __repr__(self) -> str:
        return f"Lookahead({self.attribute.name}, {len(self.terms)} terms, {self.horizon} tokens)"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside the HMM."""
        parts = (self.table, self.own, self.tokens, self._log_weights)
        return sum(part.nbytes for part in parts)

    @property
    def kind(self) -> Kind:
        """What decides how its expectations are computed."""
        return Kind(len(self.terms), self.terms.signed)

    def ahead(self, remaining: int) -> Tensor:
        """Give the table for so many tokens to come, at most the horizon: (K, h)."""
        return self.table[min(remaining, self.horizon)]

    def log_weights(self, tokens: Tensor) -> Tensor:
        """Give the log-weights of tokens, of every term: (...) ids -> (..., K) float64."""
        if not len(self.tokens):
            return self.coefficients.new_zeros(*tokens.shape, len(self.terms))
        place = torch.searchsorted(self.tokens, tokens).clamp_max(len(self.tokens) - 1)
        found = (self.tokens[place] == tokens).unsqueeze(-1)
        return torch.where(found, self._log_weights[place], 0.0)

    def eap(self, prefix: Tensor, remaining: int) -> Tensor:
        """Give the EAP of every next token after a 1-D prefix; `remaining` follow it: (V,).

        Weights of the prefix do not count: it is the prompt.
        """
        predicted, whole = self.predicted(prefix), slice(0, self.hmm.vocab_size)
        weighted = predicted * self.ahead(remaining)  # (K, h)
        joint = self.hmm.emission.predict_block(weighted.T, whole).unsqueeze(-1)
        probability = self.hmm.emission.predict_block(predicted.T, whole)
        future = Future(joint, probability, weighted.sum(-1, keepdim=True))
        coefficients = self.coefficients[:, None]
        past, only = torch.zeros_like(coefficients), torch.zeros(1, dtype=torch.long)
        weighing = Weighing(coefficients, past, [self.own], only)
        eap = expect(self.kind, future, weighing, whole)
        return (eap.share * eap.log_size.exp())[:, 0].clamp_max_(1.0)

    def predicted(self, prefix: Tensor) -> Tensor:
        """Give the distribution of the next state after a 1-D prefix, or at the start: (1, h)."""
        if not len(prefix):
            return self.hmm.initial[None]
        *_, last = inference.scan(self.hmm, prefix[None].to(self.hmm.device))
        return last.predicted


def _table(hmm: HMM, tokens: Tensor, losses: Tensor, horizon: int, *, signed: bool) -> Tensor:
    """Walk backward: (horizon + 1, K, h). Its cost grows with the tokens that have a weight.

    L[0] = 1; L[r] = transition @ (expected * L[r - 1]), expected[z] = 1 - lost[z], lost[z] = sum_x
    (1 - w(x)) emission[x, z]. With D = 1 - L: D[r] = transition @ (lost + expected * D[r - 1]).
    """
    lost = hmm.emission.expect(losses, tokens).clamp(0.0, 1.0)  # (K, h)
    table = lost.new_empty(horizon + 1, *lost.shape)
    table[0] = 0.0 if signed else 1.0
    for left in range(1, horizon + 1):
        kept = (1 - lost) * table[left - 1]
        table[left] = hmm.transition.expect(kept + lost if signed else kept).clamp_(0.0, 1.0)
    return table
