"""What candidates add: texts written toward an attribute, judged, and read by the bare LM."""

import os

import torch

from candidates.reference import Reference, Weights
from candidates.tasks import Candidate, Task
from candidates.workbench import Workbench
from candidates.writing import CandidateSampler
from foretrace.engines.transformers import decode_after
from foretrace.engines.transformers.sampler import Sampler
from foretrace.evaluate import metrics
from foretrace.evaluate.linear_judge import LinearJudge
from foretrace.evaluate.perplexity import mean_nll


def control(
    bench: Workbench, task: Task, candidate: Candidate, weights: Weights
) -> list[metrics.Point]:
    """Write toward the attribute, more and more strongly; give what it reaches, and its price."""
    reference = Reference(bench.tables(candidate.look), weights, task.horizon)
    look = bench.look(candidate.look)
    return [
        point(
            bench,
            task,
            f"{task.name}, {candidate.name}, {strength:g}",
            CandidateSampler(
                bench.lm, bench.ends, 20, 0.9, bench.hmm, reference, look, strength, shift
            ),
        )
        for strength, shift in task.points[-bench.size.points :]
    ]


def point(bench: Workbench, task: Task, name: str, sampler: Sampler) -> metrics.Point:
    """Write, judge, and let the LM read what was written."""
    texts, prompts = bench.prompts(task.prompts, bench.size.prompts)

    def write() -> list[list[str]]:
        found = []
        for at in range(0, len(prompts), 25):
            torch.manual_seed(at)
            drawn = sampler.draw(prompts[at : at + 25], bench.size.continuations)
            for prompt, own in zip(prompts[at : at + 25], drawn, strict=True):
                found.append([decode_after(bench.tokenizer, prompt, each.tokens) for each in own])
        return found

    written = bench.keep(f"{name} texts", write)
    judged = bench.keep(f"{name} judged", lambda: _judge(bench, task, written))
    nats = bench.keep(
        f"{name} nats",
        lambda: mean_nll(bench.lm, bench.tokenizer, texts, written, bos_token_id=bench.begin),
    )
    return metrics.Point(task.figure(judged), metrics.perplexity(nats))


def _judge(bench: Workbench, task: Task, written: list[list[str]]) -> list[list[float]]:
    """Ask the judge of the evaluation; where there is none, count words, so that it runs."""
    flat = [text for own in written for text in own]
    scores = iter([float(len(text.split())) for text in flat])
    if bench.judges is not None:
        encoder = os.environ.get("FORETRACE_ENCODER")
        judge = LinearJudge.load(bench.judges / task.judge, encoder=encoder)
        scores = iter(judge.scorer(task.label)(flat))
    return [[next(scores) for _ in own] for own in written]
