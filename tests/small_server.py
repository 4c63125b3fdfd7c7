"""The environment of a small server, for tests of its parts without a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from foretrace.attribute import Attribute
from foretrace.engines.vllm.settings import Settings, open_builder
from random_attributes import write_random
from tiny_lm import tiny_hmm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@contextmanager
def small_server(
    folder: Path, tokenizer: "PreTrainedTokenizerFast", *, has_bytes: bool = True
) -> Iterator[Settings]:
    """Set the environment of a server with the attributes `a0` (a product) and `kind` (evidence).

    `has_bytes` says whether the server knows the tokenizer, and so the bytes of its tokens.
    """
    hmm = tiny_hmm(tokenizer, states=8)
    hmm.save_pretrained(folder / "hmm")
    tokenizer.save_pretrained(folder / "lm")
    known, size = hmm.config.tokenizer_fingerprint, len(tokenizer)
    write_random(folder / "attributes", "a0", size, share=0.5, known=known, seed=0)
    rewards = torch.randn(size, generator=torch.Generator().manual_seed(0))
    kind = Attribute.from_rewards(rewards, tokenizer_fingerprint=known)
    kind.save(folder / "attributes" / "kind.safetensors")
    hmm_folder, attributes, tables, lm = (
        str(folder / name) for name in ("hmm", "attributes", "tables", "lm")
    )
    settings = Settings(hmm_folder, attributes, tables, tokenizer=lm if has_bytes else "")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in settings.to_environment().items():
            patched.setenv(name, value)
        open_builder.cache_clear()
        yield settings
        open_builder.cache_clear()


@pytest.fixture
def any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the decoding process take a config without an LM."""
    monkeypatch.setattr("foretrace.engines.vllm.core._check_model", lambda *checked: None)
