"""Steering: the theorem, and that the state is a cache."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Goal, Lookahead, Matching, Request
from tiny import TOKENS, all_texts, tiny_hmm
from tiny_attributes import attributes

LENGTH = 4


def log_likelihood_of_next(hmm: HMM, texts: Tensor) -> Tensor:
    """An LM that is the HMM: log p(next token | text), (n, V)."""
    if texts.shape[1] == 0:
        return hmm.emission.predict(hmm.initial.expand(len(texts), -1)).log()
    return hmm.emission.predict(hmm.filter(texts).predicted[:, -1]).log()


@pytest.mark.parametrize("name", ["one", "mixture", "or", "not", "all"])
@pytest.mark.parametrize("form", ["dense", "sparse", "eos"])
def test_steered_by_itself_the_hmm_writes_from_the_posterior(form: str, name: str) -> None:
    """p'(x) is p(x) p(s | x) / p(s), exactly: multiplied up over all texts, and by drawing."""
    hmm, attribute = tiny_hmm(form), attributes()[name]
    texts = all_texts(LENGTH)
    eos = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    joint = hmm.log_likelihood(texts).exp() * attribute.probability(texts, ~torch.isin(texts, eos))
    joint = torch.where(hmm.log_likelihood(texts) > -60, joint, 0.0)
    expected = joint / joint.sum()
    request = Request((Goal(Lookahead(hmm, attribute, LENGTH)),), (), LENGTH)
    steering, log_steered = Matching(hmm), torch.zeros(len(texts), dtype=torch.float64)
    for length in range(LENGTH):
        prefixes = torch.tensor(list(itertools.product(range(TOKENS), repeat=length))).long()
        prefixes = prefixes.reshape(TOKENS**length, length)
        steering.step([request] * len(prefixes), prefixes.tolist())
        logits = log_likelihood_of_next(hmm, prefixes)
        steered = steering.reweight(logits).log_softmax(-1)
        log_steered += steered.flatten().repeat_interleave(TOKENS ** (LENGTH - length - 1))
    found = torch.where(joint > 0, log_steered.exp(), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_sampled_texts_are_of_the_posterior() -> None:
    hmm, attribute = tiny_hmm("dense"), attributes()["all"]
    texts = all_texts(LENGTH)
    joint = hmm.log_likelihood(texts).exp() * attribute.probability(texts)
    request = Request((Goal(Lookahead(hmm, attribute, LENGTH)),), (), LENGTH)
    steering, count = Matching(hmm), 20_000
    generator = torch.Generator().manual_seed(0)
    drawn = torch.zeros(count, 0, dtype=torch.long)
    for _ in range(LENGTH):
        steering.step([request] * count, drawn.tolist())
        steered = steering.reweight(log_likelihood_of_next(hmm, drawn)).softmax(-1)
        drawn = torch.cat([drawn, torch.multinomial(steered, 1, generator=generator)], 1)
    code = (drawn * TOKENS ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    counts = torch.bincount(code, minlength=TOKENS**LENGTH)
    assert chisquare(counts, count * joint / joint.sum()).pvalue > 1e-3


def test_memory_is_a_belief_and_a_past_for_each_row() -> None:
    """Per row h numbers and K sums; per attribute (horizon + 1) K h numbers, and K V of tokens."""
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()["all"], 7)
    terms = len(lookahead.terms)
    assert lookahead.table.nbytes == 8 * 8 * terms * hmm.num_states
    assert lookahead.nbytes == lookahead.table.nbytes + 8 * terms * TOKENS
    steering = Matching(hmm)
    requests = [Request((Goal(lookahead),), (1, 2), 9) for _ in range(3)]
    for written in ([], [1], [1, 3]):
        steering.step(requests, [written] * 3)
    assert len(steering._known) == len(steering.rows) == 3
    row = steering.rows[0]
    assert row is not None
    assert row.predicted.shape == (hmm.num_states,)
    assert [past.shape for past in row.past] == [(terms,)]


def test_logits_of_other_rows_are_refused() -> None:
    hmm = tiny_hmm("dense")
    steering = Matching(hmm)
    steering.step([Request((), (), 5)], [[]])
    with pytest.raises(InvalidInputError, match="1 rows"):
        steering.reweight(torch.zeros(2, TOKENS))
    with pytest.raises(InvalidInputError, match="4 tokens"):
        steering.reweight(torch.zeros(1, TOKENS - 1))
