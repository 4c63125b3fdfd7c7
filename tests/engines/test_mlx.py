"""MLX-LM is steered as transformers is, with the logits that MLX computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mlx_lm", reason="needs the extra `mlx`")
pytest.importorskip("transformers", reason="needs the extra `transformers`")

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step

from foretrace.engines.mlx import logits_processor
from foretrace.engines.transformers import SteeringProcessor
from foretrace.hmm import HMM
from host_goals import KINDS, goal_of
from tiny_lm import WORDS

VOCAB, NEW = len(WORDS), 6


@pytest.fixture(scope="module")
def model(tiny_lm: Path) -> Any:
    return load(str(tiny_lm))[0]


@pytest.mark.shows("MLX-LM", "greedy", "constraints", "several goals")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_of_the_reweighted_logits(model: Any, kind: str) -> None:
    goal = goal_of(kind, HMM.random(4, VOCAB, eos_token_id=0), NEW)
    changed = 0
    for prompt in [[token, token + 1, 5][: 1 + token % 3] for token in range(3, 23)]:
        expected = SteeringProcessor(
            goal, prompt_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW
        )
        seen: list[tuple[list[int], Any]] = []

        def record(tokens: Any, logits: Any, seen: Any = seen) -> Any:
            seen.append((tokens.tolist(), np.array(logits.astype(mx.float32))))
            return logits

        processors = [record, logits_processor(goal, max_new_tokens=NEW)]
        steps = generate_step(mx.array(prompt), model, max_tokens=NEW, logits_processors=processors)
        for step, (token, _) in enumerate(steps):
            ids, logits = seen[step]
            bare = torch.from_numpy(logits)
            assert int(token) == int(expected(torch.tensor([ids]), bare).argmax())
            changed += int(token) != int(bare.argmax())
    assert changed >= 10
