"""Fidelity of lookahead: compare EAPs under the HMM with texts that the LM generates.

The LM continues every prefix many times. Across prefixes, the HMM's expected attribute probability
should agree with the mean over the continuations. Steering uses only
differences within a prefix: there, the EAP should be lower for first tokens after which the
continuation violates the attribute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from foretrace.engines.transformers.batch import model_inputs, pad_left
from foretrace.engines.transformers.sampler import Sampler
from foretrace.errors import InvalidInputError
from foretrace.evaluate.metrics import rank_correlation
from foretrace.hmm import HMM, inference
from foretrace.lookahead import Lookahead
from foretrace.lookahead.kernels import EapKind
from foretrace.steering.state import predict_after

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOWS = (2, 10, 19)  # numbers of tokens after the first: up to the 3rd, 11th and 20th
VIOLATED = 0.5  # a product of weights below it is a violation
BINS = 10
FOLDS = 5  # of the cross-validation of the probe
Floats = NDArray[np.float64]


@dataclass
class Probe:
    """A linear probe on the LM's hidden states, as a reference for the HMM's belief.

    It holds, for each prefix, the hidden states after first tokens, (tokens, size), and whether a
    violation followed, (tokens,).
    """

    states: list[Floats] = field(default_factory=list)
    violated: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, states: Floats, violated: NDArray[np.bool_]) -> None:
        """Add the data of a prefix."""
        self.states.append(states)
        self.violated.append(violated)

    def expected(self) -> list[Floats]:
        """Predict the probability of no violation by cross-validation over prefixes."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        predictions = [np.full(len(prefix_states), 0.5) for prefix_states in self.states]
        for fold in range(FOLDS):
            train = [index for index in range(len(self.states)) if index % FOLDS != fold]
            labels = [violated for index in train for violated in self.violated[index]]
            if len(set(labels)) < 2:
                continue  # one class only: all predictions stay equal
            probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
            probe.fit(np.concatenate([self.states[index] for index in train]), labels)
            for index in range(fold, len(self.states), FOLDS):
                predictions[index] = probe.predict_proba(self.states[index])[:, 0]
        return predictions


@dataclass
class Fidelity:
    """Expectations and outcomes at every prefix.

    Attributes:
        expected: For each number of tokens, the HMM's expectation at each prefix.
        observed: For each number of tokens, the mean over the LM's continuations of each prefix.
        pairs: For each number of later tokens and each prefix, the number of pairs of continuations
            that the expectation ranks correctly, and the number of all pairs.
        eap: The EAP of every first token that the LM generated.
        firsts: For each prefix, the first tokens that the LM generated.
        probes: For each number of later tokens, the data of the linear probe, if requested.
    """

    expected: dict[int, list[float]] = field(default_factory=dict)
    observed: dict[int, list[float]] = field(default_factory=dict)
    pairs: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    eap: list[float] = field(default_factory=list)
    firsts: list[list[int]] = field(default_factory=list)
    probes: dict[int, Probe] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Compute rank correlations, calibration and concordance.

        Returns:
            `across prefixes`: for each number of tokens, the rank correlation of expectations and
            outcomes, their means, and their calibration. `within a prefix`: for each number of
            later tokens, the share of pairs that are ranked correctly, and their number.
        """
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
                "concordance": _share(pairs),
                "prefixes": sum(total > 0 for _, total in pairs),
                "pairs": int(sum(total for _, total in pairs)),
                **self._probe_concordance(later),
            }
            for later, pairs in self.pairs.items()
            if sum(total for _, total in pairs)
        }
        return {"across prefixes": across, "within a prefix": within}

    def _probe_concordance(self, later: int) -> dict[str, float]:
        """Compute the concordance of the probe on the same pairs."""
        if later not in self.probes:
            return {}
        probe = self.probes[later]
        rows = zip(probe.expected(), probe.violated, self.firsts, strict=True)
        pairs = [
            concordance(expected, violated, np.array(tokens)) for expected, violated, tokens in rows
        ]
        return {"probe": _share(pairs)}


def _share(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(correct for correct, _ in pairs) / sum(total for _, total in pairs)


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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fidelity:
    """Continue each prefix many times with the LM, and compare with the HMM's expectations.

    Args:
        lm: The language model.
        lookahead: The lookahead of an attribute with weights.
        prefixes: The token ids of each prefix.
        ends: The ids of the tokens that end a text.
        rollouts: The number of continuations of each prefix.
        length: The maximal number of tokens of a continuation.
        seed: The seed of sampling.
        probe: Whether to compare also with a linear probe on the LM's hidden states.
        on_progress: Called after each prefix with the number of prefixes done, and of all prefixes.

    Returns:
        The expectations and outcomes.

    Raises:
        InvalidInputError: If the attribute is an automaton or evidence, or the horizon is shorter
            than the continuations.

    Example:
        >>> from foretrace.evaluate.fidelity import measure_fidelity
        >>> lookahead = ft.Lookahead(hmm, attribute, horizon=2)
        >>> fidelity = measure_fidelity(
        ...     model, lookahead, [[0, 1], [0, 2]], ends=[0], rollouts=2, length=3
        ... )
        >>> list(fidelity.summary()["across prefixes"])
        [2, 10, 3]
    """
    if lookahead.has_constraint or lookahead.attribute.evidence:
        raise InvalidInputError(
            f"Fidelity is defined for attributes with weights, but '{lookahead.attribute.name}' is "
            f"evidence or a text that must occur. Fit it with objective cross-entropy."
        )
    if lookahead.horizon < length - 1:
        raise InvalidInputError(
            f"To compare over {length} tokens, the lookahead needs a horizon of {length - 1}, but "
            f"it has {lookahead.horizon}."
        )
    torch.manual_seed(seed)
    sampler = Sampler(lm, ends, length, top_p=1.0)
    fidelity, emitted_weight = Fidelity(), _emitted_weight(lookahead)
    for done, prefix in enumerate(prefixes, 1):
        (drawn,) = sampler.draw([prefix], rollouts)
        texts = [[token for token in text.tokens if token not in ends] for text in drawn]
        predicted = _predict_state(lookahead.hmm, prefix)
        _compare_across(fidelity, lookahead, emitted_weight, predicted, texts, length)
        nonempty = [text for text in texts if text]
        if nonempty:
            states = _states_after(lm, prefix, [text[0] for text in nonempty]) if probe else None
            _compare_within(fidelity, lookahead, predicted, nonempty, states)
        on_progress(done, len(prefixes))
    return fidelity


def _compare_across(
    fidelity: Fidelity,
    lookahead: Lookahead,
    emitted_weight: torch.Tensor,
    predicted: torch.Tensor,
    texts: Sequence[Sequence[int]],
    length: int,
) -> None:
    """Record the expectation over all continuations and the mean over the sampled ones."""
    for ahead in (*WINDOWS[:-1], length):
        expected = _expected_probability(lookahead, emitted_weight, predicted, ahead)
        observed = lookahead.attribute.probability([text[:ahead] for text in texts])
        fidelity.expected.setdefault(ahead, []).append(expected)
        fidelity.observed.setdefault(ahead, []).append(float(observed.mean()))


def _compare_within(
    fidelity: Fidelity,
    lookahead: Lookahead,
    predicted: torch.Tensor,
    texts: Sequence[Sequence[int]],
    states: Floats | None,
) -> None:
    """Record the pairs of continuations that the expectation after the first token ranks."""
    firsts = [text[0] for text in texts]
    fidelity.firsts.append(firsts)
    tokens = torch.tensor(firsts, device=predicted.device)
    belief = inference.condition(
        lookahead.hmm.emission, predicted.expand(len(firsts), -1), tokens
    ).belief
    coefficients = lookahead.terms.coefficients
    first_weights = lookahead.terms.weights(tokens.cpu()).T  # (n, K)
    products = belief @ _expected_products(lookahead, min(WINDOWS[-1], lookahead.horizon)).T
    eap = (first_weights * products.double().cpu()) @ coefficients
    fidelity.eap += eap.clamp(0, 1).tolist()
    for later in WINDOWS:
        table = _expected_products(lookahead, min(later, lookahead.horizon))
        expected = ((belief @ table.T).double().cpu() @ coefficients).numpy()
        later_tokens = [text[1 : later + 1] for text in texts]
        violated = lookahead.attribute.probability(later_tokens).numpy() < VIOLATED
        pairs = concordance(expected, violated, np.array(firsts))
        fidelity.pairs.setdefault(later, []).append(pairs)
        if states is not None:
            fidelity.probes.setdefault(later, Probe()).add(states, violated)


def concordance(
    expected: Floats, violated: NDArray[np.bool_], tokens: NDArray[np.int64]
) -> tuple[float, float]:
    """Count the pairs of a violating and another continuation that the expectation ranks correctly.

    Pairs with the same first token are left out. A tie counts as half correct. Returns the number
    of pairs that are ranked correctly, and of all pairs.

    Example:
        >>> import numpy as np
        >>> from foretrace.evaluate.fidelity import concordance
        >>> concordance(np.array([0.1, 0.5]), np.array([True, False]), np.array([7, 8]))
        (1.0, 1.0)
    """
    bad, good = np.flatnonzero(violated), np.flatnonzero(~violated)
    different = tokens[bad][:, None] != tokens[good]
    difference = expected[good] - expected[bad][:, None]
    correct = (difference > 0) + 0.5 * (difference == 0)
    return float((correct * different).sum()), float(different.sum())


def calibration(expected: Sequence[float], observed: Sequence[float]) -> list[dict[str, float]]:
    """Average the expectations and outcomes of prefixes in ten bins, by increasing expectation.

    Example:
        >>> from foretrace.evaluate.fidelity import calibration
        >>> calibration([0.75, 0.25], [1.0, 0.0])
        [{'expected': 0.25, 'observed': 0.0}, {'expected': 0.75, 'observed': 1.0}]
    """
    order = np.argsort(expected)
    bins = [indices for indices in np.array_split(order, BINS) if len(indices)]
    return [
        {
            "expected": float(np.mean(np.array(expected)[indices])),
            "observed": float(np.mean(np.array(observed)[indices])),
        }
        for indices in bins
    ]


def _predict_state(hmm: HMM, prefix: Sequence[int]) -> torch.Tensor:
    """Compute the distribution of the HMM's state after a prefix: (1, h)."""
    length, tokens = torch.tensor([len(prefix)]), torch.tensor([prefix], dtype=torch.long)
    return predict_after(hmm, tokens, length)


def _emitted_weight(lookahead: Lookahead) -> torch.Tensor:
    """Compute the expected weight of the token that each state emits: (K, h)."""
    hmm, terms = lookahead.hmm, lookahead.terms
    lost = -terms.log_weights.double().expm1()
    return 1 - hmm.emission.expect(lost.to(hmm.initial), terms.tokens.to(hmm.device).long())


def _expected_probability(
    lookahead: Lookahead, emitted_weight: torch.Tensor, predicted: torch.Tensor, ahead: int
) -> float:
    """Compute the expected attribute probability over the next `ahead` tokens.

    The predicted state emits the first of them; the table covers the others.
    """
    terms = lookahead.terms
    table = _expected_products(lookahead, min(ahead - 1, lookahead.horizon))
    products = (predicted * emitted_weight * table).sum(-1)  # (K,)
    return float((terms.coefficients * products.double().cpu()).sum().clamp(0, 1))


def _expected_products(lookahead: Lookahead, ahead: int) -> torch.Tensor:
    """Return the expected products of weights: (K, h)."""
    table = lookahead.tables.values[ahead, :, 0]
    if lookahead.kind == EapKind.ONE_MINUS:
        return 1 - table
    return table * lookahead.tables.log_scales[ahead, :, 0].exp().to(table)[:, None]


@torch.inference_mode()
def _states_after(lm: "PreTrainedModel", prefix: Sequence[int], tokens: Sequence[int]) -> Floats:
    """Compute the LM's last hidden state after the prefix and each token: (tokens, size)."""
    distinct = sorted(set(tokens))
    inputs = model_inputs(*pad_left([[*prefix, token] for token in distinct], 0), lm.device)
    hidden = lm(**inputs, output_hidden_states=True, logits_to_keep=1).hidden_states[-1][:, -1]
    states = dict(zip(distinct, hidden.double().cpu().numpy(), strict=True))
    return np.stack([states[token] for token in tokens])
