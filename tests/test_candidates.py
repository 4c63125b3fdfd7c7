"""What was tried beyond the paper is exact where it says so: by enumeration, on tiny models."""

from itertools import pairwise, product
from math import prod

import pytest
import torch
from torch import Tensor

from candidates.evidence import heed
from candidates.head import Head, log_windows, refine, train
from candidates.phrases import Phrases, counts_of
from candidates.reference import Beliefs, Dense, Reference, Weights
from candidates.state_weights import log_paths
from foretrace.attribute import Attribute
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead

STATES, TOKENS, LENGTH = 3, 4, 5
PHRASES = {(0, 1): 0.3, (1, 1, 2): 0.5, (1,): 0.9, (2, 0): 0.2}


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense.of(HMM.random(STATES, TOKENS, seed=3).to(dtype=torch.float64))


def weights(kind: str) -> Weights:
    tokens = torch.tensor([1.0, 0.4, 0.9, 0.7], dtype=torch.float64)
    states = torch.tensor([0.3, 1.0, 0.8], dtype=torch.float64) if "states" in kind else None
    phrases = Phrases.of(PHRASES) if "phrases" in kind else Phrases()
    return Weights(tokens, states, phrases, absent="absent" in kind)


def by_hand(dense: Dense, own: Weights, text: tuple[int, ...]) -> tuple[float, float]:
    """Give p(text), and p(text) p(s | text), as sums over all state paths."""
    phrase = prod(
        value ** sum(text[at : at + len(each)] == each for at in range(len(text)))
        for each, value in (PHRASES if len(own.phrases.tokens) else {}).items()
    )
    said = float(prod(own.tokens[list(text)].tolist())) * phrase
    initial, transition, emission = (table.tolist() for table in vars(dense).values())
    states = [1.0] * STATES if own.states is None else own.states.tolist()
    whole = weighted = 0.0
    for path in product(range(STATES), repeat=len(text)):
        moves = [initial[path[0]], *(transition[a][b] for a, b in pairwise(path))]
        chance = prod(moves) * prod(map(lambda z, x: emission[z][x], path, text))
        whole += chance
        weighted += chance * said * prod(states[state] for state in path)
    return whole, whole - weighted if own.absent else weighted


@pytest.mark.parametrize(
    "kind", ["tokens", "states", "phrases", "states and phrases", "phrases, absent"]
)
def test_eap_is_the_sum_over_all_futures(kind: str, dense: Dense) -> None:
    own = weights(kind)
    reference = Reference(dense, own, LENGTH)
    for written in [(), (0,), (1, 1), (2, 0, 1)]:
        beliefs = Beliefs.before(dense.initial[None])
        for token in written:
            beliefs = reference.advance(beliefs, torch.tensor([token]))
        left = LENGTH - len(written) - 1
        found = reference.log_eap(beliefs, left).exp()[0]
        for token in range(TOKENS):
            futures = product(range(TOKENS), repeat=left)
            sums = [by_hand(dense, own, (*written, token, *future)) for future in futures]
            whole, weighted = map(sum, zip(*sums, strict=True))
            assert float(found[token]) == pytest.approx(weighted / whole, abs=1e-7)


def test_it_is_what_is_served_where_both_can_say_it(dense: Dense) -> None:
    hmm = HMM.random(STATES, TOKENS, seed=3).to(dtype=torch.float64)
    own = weights("tokens")
    prefix = torch.tensor([2, 0])
    lookahead = Lookahead(hmm, Attribute.from_weights(own.tokens), horizon=3)
    beliefs = Beliefs.before(lookahead.predicted(prefix))
    found = Reference(dense, own, 3).log_eap(beliefs, 3).exp()[0]
    torch.testing.assert_close(found, lookahead.eap(prefix, 3), atol=1e-6, rtol=1e-6)


def test_evidence_of_an_lm_that_is_the_hmm_changes_nothing(dense: Dense) -> None:
    predicted = torch.rand(5, STATES, dtype=torch.float64).softmax(-1)
    beliefs = Beliefs.before(predicted)
    heeded = heed(dense, beliefs, predicted @ dense.emission, steps=2)
    torch.testing.assert_close(heeded.plain, predicted, atol=1e-4, rtol=0)


def test_evidence_brings_the_next_token_nearer(dense: Dense) -> None:
    beliefs = Beliefs.before(dense.initial[None])
    lm = torch.tensor([[0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
    far, near = (
        float((lm * (lm.log() - (each.plain @ dense.emission).log())).sum())
        for each in (beliefs, heed(dense, beliefs, lm, steps=5))
    )
    assert near < far


def likelihood(dense: Dense, head: Head, hidden: Tensor, windows: Tensor) -> float:
    return float(torch.logsumexp(head(hidden).log() + log_windows(dense, windows), 1).mean())


def test_a_head_finds_the_belief_of_an_lm_that_is_the_hmm() -> None:
    """Its hidden state is the logarithm of the belief, so that the head is the identity."""
    sharp = HMM.random(STATES, TOKENS, seed=5)
    hidden = torch.randn(4000, STATES).mul(2).log_softmax(-1)
    dense = Dense.of(sharp)
    identity = Head(torch.eye(STATES), torch.zeros(STATES), torch.zeros(STATES), torch.ones(STATES))
    torch.testing.assert_close(identity(hidden), hidden.exp(), atol=1e-4, rtol=0)
    first = torch.multinomial(hidden.exp(), 1)[:, 0]
    states, windows = first, []
    for _ in range(6):
        windows.append(torch.multinomial(dense.emission[states], 1)[:, 0])
        states = torch.multinomial(dense.transition[states], 1)[:, 0]
    texts = torch.stack(windows, 1)
    trained, same = train(dense, hidden, texts, epochs=30, rate=0.05)
    assert same is dense

    least = likelihood(dense, identity, hidden, texts) - 1e-3
    assert likelihood(dense, trained, hidden, texts) > least


def test_paths_by_hand(dense: Dense) -> None:
    own = weights("states")
    assert own.states is not None
    texts = [(0, 1, 2), (3, 1)]
    found = log_paths(dense, own.states, texts).exp()
    plain = Weights(torch.ones(TOKENS), own.states)
    for text, value in zip(texts, found.tolist(), strict=True):
        whole, weighted = by_hand(dense, plain, text)
        assert value == pytest.approx(weighted / whole, abs=1e-7)


def test_phrases_are_counted_as_often_as_they_occur() -> None:
    counted = counts_of([[1, 1, 1, 2], [0, 1]], [(1, 1), (1, 1, 2), (0, 1)]).toarray()
    assert counted.tolist() == [[2, 1, 0], [0, 0, 1]]


def test_tables_trained_with_a_head_make_windows_likelier() -> None:
    """A step of EM never lowers the likelihood, whatever the head; kept tables stay as they are."""
    torch.manual_seed(0)
    dense = Dense.of(HMM.random(STATES, TOKENS, seed=3).to(dtype=torch.float64))
    hidden = torch.randn(64, 2, dtype=torch.float64)
    windows = torch.randint(0, TOKENS, (64, LENGTH))
    weight = torch.randn(2, STATES, dtype=torch.float64)
    head = Head(weight, dense.initial.log(), hidden.mean(0), hidden.std(0))
    found, before = dense, likelihood(dense, head, hidden, windows)
    for _ in range(5):
        found = refine(found, head, hidden, windows, toward=dense, kept=0.0)
        now = likelihood(found, head, hidden, windows)
        assert now > before
        before = now
    same = refine(dense, head, hidden, windows, toward=dense, kept=1e12)
    torch.testing.assert_close(same.emission, dense.emission)
    torch.testing.assert_close(same.transition, dense.transition)


def test_windows_by_hand() -> None:
    dense = Dense.of(HMM.random(STATES, TOKENS, seed=3).to(dtype=torch.float64))
    text = (1, 3, 0)
    whole, _ = by_hand(dense, weights("tokens"), text)
    found = torch.logsumexp(dense.initial.log() + log_windows(dense, torch.tensor([text])), 1)
    assert float(found.exp()) == pytest.approx(whole)
