"""Fixtures that several packages share."""

import os
import warnings
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

# Read when huggingface_hub is imported. No test needs the hub, and without a network every
# attempt to reach it is repeated for seconds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from foretrace import cli
from forked import Done, Run
from smollm2 import (
    UnavailableError,
    find_gguf,
    find_smollm2,
    has_fast_bfloat16,
    link_as_float32,
)
from tiny_lm import WORDS, tiny_hmm, word_tokenizer, write_tiny_lm

# Hypothesis' default deadline of 200 ms per example fails on a machine that others use. There are
# few examples, to keep CI short; `benchmarks/fuzz.py` tries thousands.
hypothesis_settings.register_profile("shared machine", deadline=None, max_examples=50)
hypothesis_settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the pages of the documentation first: they take longest of all files."""
    items.sort(key=lambda item: item.path.name != "test_pages.py")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, because importing torch and transformers takes seconds."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Done:
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        return Done(int(stopped.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny LM."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    return write_tiny_lm(tmp_path_factory.mktemp("tiny-lm"))


@pytest.fixture(scope="session")
def steered(tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command-line options: the tiny LM, its HMM, and attributes `odd`, `low` and `always`."""
    import torch

    from foretrace.attribute import Attribute, AttributeStore

    folder = tmp_path_factory.mktemp("steered")
    tiny_hmm(word_tokenizer()).save_pretrained(folder / "hmm")
    store = AttributeStore(folder / "attributes")
    number = torch.arange(len(WORDS)) - 1  # of the word; token 0 is the end-of-text token
    store.add(Attribute.from_weights((number % 2 == 1).float().clamp_min(1e-6), name="odd"))
    store.add(Attribute.from_weights(torch.ones(len(WORDS)), name="always"))
    store.add(Attribute.from_weights((number < 32).float().clamp_min(1e-6), name="low"))
    return [str(tiny_lm), "--hmm", str(folder / "hmm"), "--attributes", str(store.folder)]


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real LM with 135M parameters; skips where it is not available.

    Its default data type is float32 on CPUs that have no instructions for bfloat16.
    """
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reading GGUF warns
            folder = find_smollm2()
    except UnavailableError as error:
        pytest.skip(f"SmolLM2 is not available: {error}")
    if has_fast_bfloat16():
        return folder
    return link_as_float32(folder, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The same LM as a GGUF file, for llama.cpp."""
    pytest.importorskip("llama_cpp", reason="needs the extra `llama-cpp`")
    try:
        return find_gguf()
    except UnavailableError as error:
        pytest.skip(f"SmolLM2 is not available: {error}")
