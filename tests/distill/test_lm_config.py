"""The dtype that a language model is loaded in."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from foretrace.distill import LMConfig
from foretrace.distill.sampling import vllm_source

pytest.importorskip("transformers", reason="needs the extra `transformers`")


@pytest.mark.parametrize(
    ("dtype", "is_cpu", "expected"),
    [("auto", True, torch.float32), ("auto", False, "auto"), ("float16", True, "float16")],
    ids=["CPU", "GPU", "explicit"],
)
def test_the_dtype_of_vllm(
    dtype: str,
    is_cpu: bool,
    expected: object,
    tiny_lm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test double replaces vLLM, which is not installed everywhere."""
    options: dict[str, Any] = {}

    def load(**kwargs: Any) -> SimpleNamespace:
        options.update(kwargs)
        model_config = SimpleNamespace(get_vocab_size=lambda: 64, try_get_generation_config=dict)
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=model_config))

    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    monkeypatch.setattr(vllm, "LLM", load, raising=False)
    platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setattr(platforms, "current_platform", platform, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(vllm_source, "default_dtype", lambda device: torch.float32)
    LMConfig(engine="vllm", dtype=dtype).load_source(str(tiny_lm), 8)
    assert options["dtype"] == expected
    assert options["max_model_len"] == 9
