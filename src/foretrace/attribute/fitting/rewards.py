"""Fit evidence, the rewards of tokens, to scored or labelled texts."""

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.sparse import csr_array

from foretrace.attribute.evidence import Evidence
from foretrace.attribute.fitting import logistic
from foretrace.attribute.fitting.candidate import Candidate, make_candidate, targets
from foretrace.attribute.fitting.examples import Examples, Indices
from foretrace.attribute.fitting.fit_config import FitConfig
from foretrace.attribute.fitting.objectives import Array
from foretrace.attribute.transform import LogitAffine

MIN_REWARD = 0.05  # on sentiment, topics and roles, smaller rewards do not change the ranking
MAX_SHIFT = 100.0  # of the biases of labels


def fit_evidence(examples: Examples, held_out: Examples, config: FitConfig) -> Candidate:
    """Fit evidence to scores by logistic regression on token presence."""
    transform = config.transform or LogitAffine()
    presence, tokens = _presence(examples.counts, config.min_texts)
    wanted = targets(examples, transform, config)
    fitted = logistic.logistic(presence, wanted, config.penalty)
    evidence = _evidence(float(fitted.biases[0]), tokens, fitted.rewards[:, 0])
    predicted = _predict(evidence, held_out.counts)
    return make_candidate(evidence, predicted, transform, examples, held_out, config)


def fit_labels(
    examples: Examples, held_out: Examples, num_labels: int, config: FitConfig
) -> list[Candidate]:
    """Fit one evidence per label, all labels against each other.

    A softmax gives rewards that sum to 0 over the labels. The reward of a label is the difference
    from the mean of all other labels. One constant is added to the biases of all labels, so that
    their probabilities sum to 1 for the average text. Each evidence therefore separates its label
    from the rest, and the log-odds of several rank the labels as the softmax does.
    """
    presence, tokens = _presence(examples.counts, config.min_texts)
    fitted = logistic.softmax(presence, examples.strata, num_labels, config.penalty)
    scale = num_labels / (num_labels - 1)
    rewards = scale * fitted.rewards
    rewards[np.abs(rewards) < MIN_REWARD] = 0.0
    biases = scale * fitted.biases
    biases = biases + _shift_to_one(presence @ rewards + biases)
    candidates = []
    for number in range(num_labels):
        evidence = _evidence(float(biases[number]), tokens, rewards[:, number])
        candidates.append(
            make_candidate(
                evidence,
                _predict(evidence, held_out.counts),
                LogitAffine(),
                examples.scored_by_label(number),
                held_out.scored_by_label(number),
                config,
            )
        )
    return candidates


def _shift_to_one(log_odds: Array) -> float:
    """Return the constant to add to log-odds (n, K), so that their probabilities average 1 / K."""

    def excess(shift: float) -> float:
        probabilities = 0.5 * (1 + np.tanh(0.5 * (log_odds + shift)))
        return float(probabilities.mean() - 1 / log_odds.shape[1])

    return float(brentq(excess, -MAX_SHIFT, MAX_SHIFT, xtol=1e-6))


def _presence(counts: csr_array, min_texts: int) -> tuple[csr_array, Indices]:
    """Return which texts contain which tokens, 1 or 0, and the ids of these tokens."""
    texts = np.bincount(counts.indices, minlength=counts.shape[1])
    tokens = np.flatnonzero(texts >= min_texts)
    presence = counts[:, tokens]
    presence.data = np.ones_like(presence.data)
    return presence, tokens


def _evidence(bias: float, tokens: Indices, rewards: Array) -> Evidence:
    kept = np.abs(rewards) >= MIN_REWARD
    return Evidence(
        bias,
        torch.from_numpy(tokens[kept]).to(torch.int32),
        torch.from_numpy(rewards[kept]).float(),
    )


def _predict(evidence: Evidence, counts: csr_array) -> Array:
    """Return the probability of each text."""
    presence = counts[:, evidence.tokens.numpy()]
    presence.data = np.ones_like(presence.data)
    log_odds = presence @ evidence.rewards.double().numpy() + evidence.bias
    return np.asarray(0.5 * (1 + np.tanh(0.5 * log_odds)))
