"""What candidates would add to a step of decoding, if they were served."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from candidates.head import Head
from candidates.phrases import Phrase, Phrases
from candidates.workbench import Workbench
from candidates.writing import believed
from foretrace.attribute import Attribute
from foretrace.attribute.automata.dfa import DFA
from foretrace.attribute.automata.weighted import WeightedAutomaton
from foretrace.attribute.terms import Terms
from foretrace.hmm import inference
from foretrace.lookahead import Lookahead
from foretrace.steering import BatchSteering, Goal, Request
from harness import Report, seconds

HORIZON = 3
PHRASES: dict[Phrase, float] = {(50 + place % 150, 1000 + place % 71): 0.5 for place in range(300)}


def costs(bench: Workbench, report: Report) -> None:
    """Measure what each would add, against the LM's own step."""
    plain, phrased = _goal(bench, None), _goal(bench, Phrases.of(PHRASES))
    for batch in (1, 32):
        ids = torch.randint(3, bench.hmm.vocab_size, (batch, 12))
        predicted = believed(bench.hmm, ids.tolist())
        step, heeded, headed, filtered, without, steered = seconds(
            _step(bench, ids),
            _evidence(bench, predicted),
            _head(bench, batch),
            partial(inference.step, bench.hmm, predicted, ids[:, 0]),
            _steering(bench, plain, ids),
            _steering(bench, phrased, ids),
            repeats=3,
        )
        name, unit = f"batch {batch}", "of the LM"
        report.add(f"{name}: evidence adds", heeded / step, unit, at_most=0.03)
        report.add(f"{name}: a head adds", headed / step, unit)
        report.add(f"{name}: a second filter adds", filtered / step, unit, at_most=0.05)
        report.add(f"{name}: 300 phrases add", (steered - without) / step, unit)


def _step(bench: Workbench, ids: Tensor) -> Callable[[], object]:
    """Let the LM write the token after some, again and again."""
    with torch.inference_mode():
        read = bench.lm(ids, use_cache=True).past_key_values

    @torch.inference_mode()
    def step() -> None:
        bench.lm(ids[:, :1], past_key_values=read, use_cache=True, logits_to_keep=1)
        read.crop(-1)

    return step


def _evidence(bench: Workbench, predicted: Tensor) -> Callable[[], object]:
    """Do the two products of a step of evidence."""
    emission = bench.hmm.emission
    whole = emission.subset(torch.arange(bench.hmm.vocab_size))
    by_state = whole.matrix.t().to_sparse_csr()  # (h, V)
    logits = torch.randn(len(predicted), bench.hmm.vocab_size)

    def heed() -> None:
        ratio = logits.softmax(-1).div_(emission.predict(predicted).clamp_min_(1e-30))
        (by_state @ ratio.T).addr_(whole.leak, ratio @ whole.background)

    return heed


def _head(bench: Workbench, batch: int) -> Callable[[], object]:
    hidden = torch.randn(batch, bench.lm.config.hidden_size)
    return partial(Head.blank(bench.dense, torch.randn(2, hidden.shape[1])), hidden)


def _goal(bench: Workbench, phrases: Phrases | None) -> Goal:
    """Weigh some tokens, and if asked to, where the automaton of phrases is."""
    tokens = torch.arange(3, 5000, dtype=torch.int32)
    memory = None
    if phrases is not None:
        moves = torch.cat([phrases.others[:, None], phrases.moves], 1).int()
        classes = torch.arange(1, moves.shape[1], dtype=torch.int32)
        worth = torch.rand(1, len(moves), dtype=torch.float64)
        memory = WeightedAutomaton(DFA(phrases.tokens.int(), classes, moves), worth)
    one = torch.ones(1, dtype=torch.float64)
    terms = Terms(one, tokens, -torch.rand(1, len(tokens)), memory)
    return Goal(Lookahead(bench.hmm, Attribute(terms), HORIZON), 20.0, -63.0)


def _steering(bench: Workbench, goal: Goal, ids: Tensor) -> Callable[[], object]:
    """Steer one step of texts."""
    steering, logits = BatchSteering(bench.hmm), torch.randn(len(ids), bench.hmm.vocab_size)
    requests = [Request((goal,), tuple(prompt), 20) for prompt in ids.tolist()]
    rows = steering.read_generated(requests, [[]] * len(requests))
    return lambda: steering.reweight_(logits.clone(), rows)
