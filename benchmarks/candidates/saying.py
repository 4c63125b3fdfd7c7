"""What candidates say of an attribute: fitted weights, and how well they rank."""

from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from candidates import phrases, state_weights
from candidates.reference import Weights
from candidates.tasks import Candidate, Task
from candidates.workbench import Workbench


def weights_of(bench: Workbench, task: Task, candidate: Candidate) -> tuple[Weights, float]:
    """Fit what a candidate says of a task's attribute; give it with its AUC on validation."""
    rows, texts = _read(bench, task.train, task.text, bench.size.texts)
    has = torch.tensor([1 - task.score(row) for row in rows], dtype=torch.float64)
    targets = task.transform(has).numpy()
    size = bench.hmm.vocab_size

    def fit() -> dict[str, Any]:
        costs, own = phrases.fit(texts, targets, size, candidate.phrases)
        return {"costs": torch.tensor(costs), "phrases": {repr(k): v for k, v in own.items()}}

    fitted = bench.keep(f"{task.name} {candidate.phrases} phrases", fit)
    own = {tuple(map(int, key.strip("()").split(","))): v for key, v in fitted["phrases"].items()}
    costs = fitted["costs"].float()
    states = None
    if candidate.states:
        few = [text[:28] for text in texts[: bench.size.paths]]
        wanted = torch.tensor(targets[: len(few)]).float()
        states = bench.keep(
            f"{task.name} states",
            lambda: state_weights.fit(bench.dense, few, costs, wanted, epochs=4),
        )
    automaton = phrases.Phrases.of(own) if own else phrases.Phrases()
    found = Weights((-costs).exp(), states, automaton, task.absent)
    return found, _auc(bench, task, costs, own, states)


def _auc(
    bench: Workbench,
    task: Task,
    costs: Tensor,
    own: dict[tuple[int, ...], float],
    states: Tensor | None,
) -> float:
    """Rank texts that nothing was fitted to."""
    rows, whole = _read(bench, task.validation, task.text, bench.size.texts // 4)
    texts = [text[:28] for text in whole]
    total = torch.tensor([float(costs[list(text)].sum()) for text in texts]).numpy()
    if own:
        total = total - phrases.counts_of(texts, list(own)) @ np.log(list(own.values()))
    if states is not None:
        parts = [texts[at : at + 256] for at in range(0, len(texts), 256)]
        paths = [state_weights.log_paths(bench.dense, states, part) for part in parts]
        total = total - torch.cat(paths).numpy()
    return float(roc_auc_score([task.score(row) > 0.5 for row in rows], total))


@cache  # every candidate reads the same
def _read(
    bench: Workbench, file: str, column: str, count: int
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Read the first rows of a table, and the tokens of their texts."""
    rows = bench.rows(file, count)
    return rows, bench.tokens(rows, column)
