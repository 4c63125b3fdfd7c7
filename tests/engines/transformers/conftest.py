"""The tiny LM of transformers that several tests share."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture(scope="module")
def model(tiny_lm: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_lm)
    loaded.eval()
    return loaded
