"""What candidates know of the next tokens: likelihood, and concordance within a prefix."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from candidates.reference import LEAST, Beliefs, Dense, Reference, Weights
from candidates.workbench import Workbench
from candidates.writing import Look, believed
from foretrace.engines.transformers.sampler import Sampler
from foretrace.evaluate.fidelity import concordance

AHEAD, LATER = (1, 4, 16), (2, 10, 19)


def foresight(
    bench: Workbench, dense: Dense, look: Look, weights: Weights, costs: Tensor
) -> tuple[dict[int, float], dict[int, float]]:
    """Give the likelihood of the next tokens, in nats each, and concordance within a prefix."""
    reference = Reference(dense, weights, max(LATER))
    likely: dict[int, list[float]] = {count: [] for count in AHEAD}
    pairs = {later: np.zeros(2) for later in LATER}
    for row in rolled(bench):
        bench.hidden = row["hidden"][None]
        before = Beliefs.before(believed(bench.hmm, [row["prefix"]]))
        seen = look(before, row["logits"][None])
        texts = [text for text in row["texts"] if text]
        long = torch.tensor([text[: max(AHEAD)] for text in texts if len(text) >= max(AHEAD)])
        _add_likelihoods(dense, seen.plain, long, likely)
        firsts = torch.tensor([text[0] for text in texts])
        many = Beliefs(*(part.expand(len(texts), *part.shape[1:]) for part in vars(seen).values()))
        for later in LATER:
            violates = [float(costs[text[1 : later + 1]].sum()) > np.log(2) for text in texts]
            ahead = reference.ahead(many, firsts, later).double().numpy()
            pairs[later] += concordance(ahead, np.array(violates), firsts.numpy())
    shares = {later: float(right / max(count, 1)) for later, (right, count) in pairs.items()}
    return {count: float(np.mean(all_of)) / count for count, all_of in likely.items()}, shares


def _add_likelihoods(
    dense: Dense, predicted: Tensor, texts: Tensor, likely: dict[int, Any]
) -> None:
    predicted, total = predicted.expand(len(texts), -1), torch.zeros(len(texts))
    for place in range(texts.shape[1] if texts.ndim == 2 else 0):
        seen = predicted * dense.emission[:, texts[:, place]].T
        size = seen.sum(1, keepdim=True).clamp_min(LEAST)
        predicted, total = (seen / size) @ dense.transition, total + size[:, 0].log()
        if place + 1 in likely:
            likely[place + 1] += total.tolist()


def rolled(bench: Workbench) -> list[dict[str, Any]]:
    """Let the LM go on from toxic prompts, many times; with its logits and hidden state there."""

    def make() -> list[dict[str, Any]]:
        _, prefixes = bench.prompts("detox/test_prompts_toxic.jsonl.xz", bench.size.prefixes)
        sampler = Sampler(bench.lm, bench.ends, 20, top_p=1.0)
        torch.manual_seed(0)
        found = []
        for prefix in prefixes:
            with torch.inference_mode():
                logits = bench.lm(torch.tensor([prefix])).logits[0, -1].float()
            hidden = bench.hidden[0].clone()
            (drawn,) = sampler.draw([prefix], bench.size.rollouts)
            texts = [[t for t in each.tokens if t not in bench.ends] for each in drawn]
            found.append({"prefix": prefix, "texts": texts, "logits": logits, "hidden": hidden})
        return found

    found: list[dict[str, Any]] = bench.keep("rollouts", make)
    return found
