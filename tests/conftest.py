"""Fixtures that several rooms share."""

import warnings
from pathlib import Path

import pytest

from smollm2 import UnavailableError, find_smollm2
from tiny_lm import WORDS, tiny_hmm, word_tokenizer, write_tiny_lm


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny real LM."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    return write_tiny_lm(tmp_path_factory.mktemp("tiny-lm"))


@pytest.fixture(scope="session")
def steered(tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The LM, an HMM of it, and the folder of `odd`, `low` and `always`, as options."""
    import torch

    from foretrace.attribute import Attribute, AttributeStore

    folder = tmp_path_factory.mktemp("steered")
    tiny_hmm(word_tokenizer()).save_pretrained(folder / "hmm")
    store = AttributeStore(folder / "attributes")
    number = torch.arange(len(WORDS)) - 1  # of the word; the first token ends texts
    store.add(Attribute.from_weights((number % 2 == 1).float().clamp_min(1e-6), name="odd"))
    store.add(Attribute.from_weights(torch.ones(len(WORDS)), name="always"))
    store.add(Attribute.from_weights((number < 32).float().clamp_min(1e-6), name="low"))
    return [str(tiny_lm), "--hmm", str(folder / "hmm"), "--attributes", str(store.folder)]


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
