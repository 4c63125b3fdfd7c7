"""What lookahead is worth: the HMM's expectations, held against what the LM does write.

At prefixes, the LM itself is asked many times how it goes on. Across prefixes, the HMM's expected
attribute probability should agree with the mean of what was written; within a prefix, which is all
that steering uses, it should be lower after tokens that lead to what violates the attribute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from foretrace.engines.transformers.sampler import Sampler
from foretrace.errors import InvalidInputError
from foretrace.evaluate.metrics import rank_correlation
from foretrace.evaluate.probe import Probe, states_after
from foretrace.hmm import inference
from foretrace.lookahead import Lookahead
from foretrace.steering import BatchSteering, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOWS = (2, 10, 19)  # later tokens that are looked at: the 2nd to the 3rd, 11th, 20th
VIOLATED = 0.5  # of the product of their weights
BINS = 10
Floats = NDArray[np.float64]


@dataclass
class Fidelity:
    """Expectations and outcomes at every prefix, by tokens to come."""

    expected: dict[int, list[float]] = field(default_factory=dict)
    """By tokens to come: the HMM's expectation at each prefix ..."""
    observed: dict[int, list[float]] = field(default_factory=dict)
    """... and the mean over what the LM wrote."""
    pairs: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """By later tokens: of each prefix, pairs ranked rightly, and pairs."""
    eap: list[float] = field(default_factory=list)
    """The EAP of every first token that the LM wrote."""
    firsts: list[list[int]] = field(default_factory=list)
    """Of each prefix, the first tokens that the LM wrote."""
    probes: dict[int, Probe] = field(default_factory=dict)
    """By later tokens: the yardstick, if one was asked for."""

    def summary(self) -> dict[str, Any]:
        """Give rank correlations, calibration and concordance."""
        across = {}
        for ahead, expected in self.expected.items():
            observed = self.observed[ahead]
            across[ahead] = {
                "spearman": rank_correlation(expected, observed),
                "expected": float(np.mean(expected)),
                "observed": float(np.mean(observed)),
                "calibration": calibration(expected, observed),
            }
        within = {
            later: {
                "concordance": _share(own),
                "prefixes": sum(n > 0 for _, n in own),
                "pairs": int(sum(n for _, n in own)),
                **self._yardstick(later),
            }
            for later, own in self.pairs.items()
            if sum(n for _, n in own)
        }
        return {"across prefixes": across, "within a prefix": within}

    def _yardstick(self, later: int) -> dict[str, float]:
        """Give the concordance of the probe on the same pairs."""
        if later not in self.probes:
            return {}
        probe = self.probes[later]
        rows = zip(probe.expected(), probe.violated, self.firsts, strict=True)
        pairs = [concordance(own, bad, np.array(tokens)) for own, bad, tokens in rows]
        return {"probe": _share(pairs)}


def _share(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(right for right, _ in pairs) / sum(count for _, count in pairs)


def measure_fidelity(
    lm: "PreTrainedModel",
    lookahead: Lookahead,
    prefixes: Sequence[Sequence[int]],
    *,
    ends: Sequence[int],
    rollouts: int = 64,
    length: int = 20,
    seed: int = 0,
    probe: bool = False,
    observe: Callable[[int, int], None] = lambda done, total: None,
) -> Fidelity:
    """Let the LM go on from each prefix many times, and compare with what the HMM expects.

    With `probe`, also with what a linear probe on the LM's own state expects.
    """
    if lookahead.automaton is not None:
        raise InvalidInputError("Fidelity is of attributes with weights, not of what must occur.")
    if lookahead.horizon < length - 1:
        raise InvalidInputError(
            f"To compare over {length} tokens, the lookahead must reach {length - 1}, not "
            f"{lookahead.horizon}."
        )
    torch.manual_seed(seed)
    sampler = Sampler(lm, ends, length, top_p=1.0)
    steering = BatchSteering(lookahead.hmm)
    found, kept = Fidelity(), _kept(lookahead)
    for done, prefix in enumerate(prefixes, 1):
        (drawn,) = sampler.draw([prefix], rollouts)
        texts = [[token for token in each.tokens if token not in ends] for each in drawn]
        predicted = _predicted(steering, prefix)
        _across(found, lookahead, kept, predicted, texts, length)
        written = [text for text in texts if text]
        if written:
            states = states_after(lm, prefix, [text[0] for text in written]) if probe else None
            _within(found, lookahead, predicted, written, states)
        observe(done, len(prefixes))
    return found


def _across(
    found: Fidelity,
    lookahead: Lookahead,
    kept: torch.Tensor,
    predicted: torch.Tensor,
    texts: Sequence[Sequence[int]],
    length: int,
) -> None:
    """Compare the expectation over all that may come with the mean over what came."""
    for ahead in (*WINDOWS[:-1], length):
        # The state before the first token is what is predicted: one emission, then the table.
        weighed = _value(lookahead, kept, predicted, ahead)
        written = lookahead.attribute.probability([text[:ahead] for text in texts])
        found.expected.setdefault(ahead, []).append(weighed)
        found.observed.setdefault(ahead, []).append(float(written.mean()))


def _within(
    found: Fidelity,
    lookahead: Lookahead,
    predicted: torch.Tensor,
    texts: Sequence[Sequence[int]],
    states: Floats | None,
) -> None:
    """Count the pairs of continuations that the first token's expectation ranks rightly."""
    firsts = [text[0] for text in texts]
    found.firsts.append(firsts)
    tokens = torch.tensor(firsts, device=predicted.device)
    belief = inference.condition(
        lookahead.hmm.emission, predicted.expand(len(firsts), -1), tokens
    ).belief
    own = lookahead.log_weights(tokens).cpu().exp()  # (n, K)
    whole = belief @ _products(lookahead, min(WINDOWS[-1], lookahead.horizon)).T
    eap = (own * whole.double().cpu()) @ lookahead.terms.coefficients
    found.eap += eap.clamp(0, 1).tolist()
    for later in WINDOWS:
        table = _products(lookahead, min(later, lookahead.horizon))
        ahead = ((belief @ table.T).double().cpu() @ lookahead.terms.coefficients).numpy()
        rest = [text[1 : later + 1] for text in texts]
        violated = lookahead.attribute.probability(rest).numpy() < VIOLATED
        pairs = concordance(ahead, violated, np.array(firsts))
        found.pairs.setdefault(later, []).append(pairs)
        if states is not None:
            found.probes.setdefault(later, Probe()).add(states, violated)


def concordance(
    expected: Floats, violated: NDArray[np.bool_], tokens: NDArray[np.int64]
) -> tuple[float, float]:
    """Count pairs of unlike first tokens, one of which violated later: ranked rightly, and all.

    A pair of equal expectations is half right.
    """
    bad, good = np.flatnonzero(violated), np.flatnonzero(~violated)
    unlike = tokens[bad][:, None] != tokens[good]
    difference = expected[good] - expected[bad][:, None]
    right = (difference > 0) + 0.5 * (difference == 0)
    return float((right * unlike).sum()), float(unlike.sum())


def calibration(expected: Sequence[float], observed: Sequence[float]) -> list[dict[str, float]]:
    """Average expectations and outcomes over equally many prefixes at a time, in rising order."""
    order = np.argsort(expected)
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    return [
        {
            "expected": float(np.mean(np.array(expected)[part])),
            "observed": float(np.mean(np.array(observed)[part])),
        }
        for part in parts
    ]


def _predicted(steering: BatchSteering, prefix: Sequence[int]) -> torch.Tensor:
    """Give the distribution of the state after a prefix: (1, h)."""
    length, tokens = torch.tensor([len(prefix)]), torch.tensor([prefix], dtype=torch.long)
    (row,) = steering.read([Request((), tuple(prefix), 0)], tokens, length, length)
    return row.predicted[None]


def _kept(lookahead: Lookahead) -> torch.Tensor:
    """Give the expected weight of one token of each state: (K, h)."""
    hmm, terms = lookahead.hmm, lookahead.terms
    lost = -terms.log_weights.double().expm1()
    return 1 - hmm.emission.expect(lost.to(hmm.initial), terms.tokens.to(hmm.device).long())


def _value(lookahead: Lookahead, kept: torch.Tensor, predicted: torch.Tensor, ahead: int) -> float:
    """Give the expected probability of the attribute over `ahead` tokens to come.

    The first of them is emitted by the predicted state, the others are in the table.
    """
    terms = lookahead.terms
    table = _products(lookahead, min(ahead - 1, lookahead.horizon))
    products = (predicted * kept * table).sum(-1)  # (K,)
    return float((terms.coefficients * products.double().cpu()).sum().clamp(0, 1))


def _products(lookahead: Lookahead, ahead: int) -> torch.Tensor:
    """Give the expected products themselves; a signed table holds what they lack of 1: (K, h)."""
    table = lookahead.table_for(ahead)
    return 1 - table if lookahead.kind.complement else table
