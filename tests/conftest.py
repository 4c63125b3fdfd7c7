"""Fixtures that several rooms share."""

from pathlib import Path

import pytest

from tiny_lm import write_tiny_lm


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny real LM."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    return write_tiny_lm(tmp_path_factory.mktemp("tiny-lm"))
