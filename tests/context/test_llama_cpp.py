"""A probe of a GGUF file reads the logits of llama.cpp, which come from the quantised head."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("llama_cpp", reason="needs the extra `llama-cpp`")
pytest.importorskip("gguf", reason="needs the extra `llama-cpp`")

from foretrace.context import Probe, read_head
from foretrace.context.measure import logit_error
from foretrace.gguf import GGUFTokenizer, load_llama

pytestmark = pytest.mark.llama_cpp


def test_all_logits_follow_from_the_states(smollm2_gguf: Path) -> None:
    head = read_head(smollm2_gguf)
    llm = load_llama(str(smollm2_gguf), n_ctx=64, n_threads=1, logits_all=True)
    assert set(GGUFTokenizer(llm).all_special_ids) <= head.excluded
    tokens = llm.tokenize(b"The lighthouse stood on the cliff, and every evening")
    llm.eval(tokens)
    logits = torch.from_numpy(llm.scores[: len(tokens)].copy())
    llm.close()
    assert logit_error(Probe.build(head), head, logits) < 1e-4
