"""Fixtures that several rooms share."""

import warnings
from pathlib import Path

import pytest

from smollm2 import UnavailableError, find_smollm2
from tiny_lm import write_tiny_lm


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny real LM."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    return write_tiny_lm(tmp_path_factory.mktemp("tiny-lm"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of a real LM of 135M parameters; skips, saying why, where it cannot be had."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reading GGUF is others' code
            return find_smollm2()
    except UnavailableError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")
