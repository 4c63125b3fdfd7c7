"""A probe reads the hidden states of a real LM."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.context import Head, Probe, read_head
from foretrace.context.measure import state_error

pytestmark = pytest.mark.slow

TEXT = (
    "The lighthouse stood on the cliff, and every evening the keeper climbed its stairs. In 1987 "
    "prices rose by 3.4%. def main(): return [x for x in range(10)]"
)


@pytest.fixture(scope="module")
def lm(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def head(smollm2: Path) -> Head:
    return read_head(smollm2)


def test_states_of_a_real_lm(smollm2: Path, lm: Any, head: Head) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    probe = Probe.build(head)
    probe.require_head(Head.of_model(lm).fingerprint)
    assert probe.config.condition < 50
    with torch.inference_mode():
        ran = lm(**tokenizer(TEXT, return_tensors="pt"), output_hidden_states=True)
    logits, states = ran.logits[0], ran.hidden_states[-1][0]
    assert state_error(probe, logits, states) < 1e-4
    assert state_error(probe, logits.log_softmax(-1), states) < 1e-4
    assert state_error(probe, logits.bfloat16(), states) < 5e-3
    for bias in (0.1, 0.5, 1.0, 2.0, 5.0, -100.0):  # noticed, or too small to matter
        changed = logits.clone()
        changed[:, probe.tokens[::50]] += bias
        found, readable = probe.read(changed)
        errors = (found - states).norm(dim=1) / states.norm(dim=1)
        assert readable.all()
        assert errors.max() < 1e-2


def test_texts_hardly_ever_contain_the_tokens(head: Head) -> None:
    from foretrace.hmm import HMM

    examples = Path(__file__).parents[2] / "examples"
    frequencies = HMM.from_pretrained(examples / "smollm2-135m").token_frequencies()
    tokens = Probe.build(head).tokens
    uniform = len(tokens) / len(frequencies)
    assert frequencies[tokens].sum() < 0.1 * uniform
    assert frequencies[tokens].max() < 1e-3
