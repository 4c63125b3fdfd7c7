"""What the future holds: the expected weight of all that may follow, by state and tokens left."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.vocabulary import require_same_fingerprint


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Lookahead:
    """Backward tables of an attribute under an HMM, frozen: rows and requests share one.

    `table[r, k, z]` tells of term k over r tokens to come, given the state z before them: the
    expected product of their weights, eq. (backward); where coefficients have both signs, 1 minus
    that, so that small differences keep their digits. It is indexed by what remains: the HMM is
    homogeneous, and one table serves every length. A horizon of 0 weighs the next token alone.

    To end a text is a way to lack nothing, and goals of great strength drive texts to it. With
    `neutral_end`, an end of text counts as the average of what may come, so that it is no escape.
    """

    hmm: HMM
    attribute: Attribute
    horizon: int
    neutral_end: bool
    terms: Terms  # those of the attribute; end of text has no weight
    tokens: Tensor  # (M,) that have a weight, on the HMM's device
    weights: Tensor  # (K, M) of them
    table: Tensor  # (horizon + 1, K, h)
    _ids: NDArray[np.int32]  # (M,): the tokens once more, to look one up without a launch

    def __init__(
        self, hmm: HMM, attribute: Attribute, horizon: int = 64, *, neutral_end: bool = False
    ) -> None:
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
        lost = -log_weights.expm1()  # 1 - w, to the last digit
        parts = {
            "hmm": hmm,
            "attribute": attribute,
            "horizon": horizon,
            "neutral_end": neutral_end,
            "terms": terms,
            "tokens": tokens,
            "weights": log_weights.exp().to(hmm.initial),
            "_ids": terms.tokens.numpy(),
            "table": _table(hmm, tokens, lost.to(hmm.initial), horizon, signed=terms.signed),
        }
        for name, part in parts.items():
            object.__setattr__(self, name, part)

    def __repr__(self) -> str:
        return f"Lookahead({self.attribute.name}, {len(self.terms)} terms, {self.horizon} tokens)"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside the HMM."""
        return self.table.nbytes + self.weights.nbytes + self.tokens.nbytes

    def ahead(self, remaining: Tensor) -> Tensor:
        """Give the tables for so many tokens to come, at most the horizon: (n,) -> (n, K, h)."""
        return self.table[remaining.clamp(0, self.horizon).to(self.table.device)]

    def past(self, written: Sequence[int]) -> Tensor:
        """Sum the log-weights of what is written, of every term: (K,) float64."""
        tokens = torch.tensor(written, dtype=torch.long)
        return self.terms.sums(tokens, torch.zeros_like(tokens), 1)[0]

    def weighed(self, past: Tensor, token: int) -> Tensor:
        """Add the log-weights of one more token; the past itself if it has none."""
        place = int(np.searchsorted(self._ids, token))
        if place == len(self._ids) or self._ids[place] != token:
            return past
        return past + self.terms.log_weights[:, place]

    def eap(self, prefix: Tensor, remaining: int) -> Tensor:
        """Give the EAP of every next token after a 1-D prefix; `remaining` follow it: (V,).

        Weights of the prefix do not count: it is the prompt.
        """
        predicted = self.predicted(prefix)
        left = torch.tensor([remaining], device=self.hmm.device)
        past = torch.zeros(1, len(self.terms), dtype=torch.float64)
        weighted = predicted[:, None] * self.ahead(left)
        joint, probability = (
            self.hmm.emission.predict(weighted),
            self.hmm.emission.predict(predicted),
        )
        return self.log_eap(joint, probability, weighted.sum(-1), past)[0].exp()

    def predicted(self, prefix: Tensor) -> Tensor:
        """Give the distribution of the next state after a 1-D prefix, or at the start: (1, h)."""
        if not len(prefix):
            return self.hmm.initial[None]
        *_, last = inference.scan(self.hmm, prefix[None].to(self.hmm.device))
        return last.predicted

    def log_eap(self, joint: Tensor, probability: Tensor, average: Tensor, past: Tensor) -> Tensor:
        """Give log EAP of every next token of n rows: eq. (EAP) -> (n, V), at most 0.

        joint[n, k, x] is sum_z predicted[z] emission[x, z] table[r, k, z]; probability, (n, V), the
        same without the table; average, (n, K), is what joint sums to, and stands in for tokens
        that no state emits; past, (n, K), are sums of log-weights of what is written, in float64.
        """
        least = inference.IMPOSSIBLE
        ratio = torch.add(joint, average.unsqueeze(-1), alpha=least)
        ratio.div_((probability + least).unsqueeze(1))
        ratio[..., self.tokens] *= self.weights
        if self.neutral_end:
            ratio[..., list(self.hmm.config.eos_token_ids)] = average.unsqueeze(-1)
        coefficients = self.terms.coefficients
        if not self.terms.signed:
            # The past may be smaller than any float32: its size is put aside as a logarithm.
            size = past.max(-1, keepdim=True).values.clamp_min(-1e30)
            eap = _combined(coefficients * (past - size).exp(), ratio)
            return eap.clamp_min_(least).log_().add_(size.to(eap)).clamp_max_(0.0)
        lost = _combined(coefficients * past.exp(), ratio)
        eap = self._so_far(past, lost).sub_(lost)
        return eap.clamp_(least, 1.0).log_()

    def _so_far(self, past: Tensor, like: Tensor) -> Tensor:
        """Give the probability of the attribute if the text ended with the next token: (n, V)."""
        terms = self.terms
        so_far = terms.probability(past).to(like)[:, None].repeat(1, like.shape[-1])
        own = past[:, None] + terms.log_weights.T.double()  # (n, M, K)
        so_far[:, self.tokens] = terms.probability(own).to(like)
        return so_far


def _combined(shares: Tensor, ratio: Tensor) -> Tensor:
    """Sum over the terms, reusing the memory of the first: (n, K), (n, K, V) -> (n, V)."""
    weights = shares.to(ratio).unsqueeze(-1)
    total = ratio[:, 0].mul_(weights[:, 0])
    for term in range(1, ratio.shape[1]):
        total.addcmul_(ratio[:, term], weights[:, term])
    return total


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
