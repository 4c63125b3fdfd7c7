"""A real LM in llama.cpp, and goals for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrace.attribute import AttributeStore
from foretrace.attribute.expression import Contains
from foretrace.engines.token_bytes import TokenBytes
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal, Compiler, Goal

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="session")
def llm(smollm2_gguf: Path) -> Iterator[Any]:
    from foretrace.gguf import load_llama

    llm = load_llama(str(smollm2_gguf), n_ctx=256, n_threads=1)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def tokenizer(llm: Any) -> Any:
    from foretrace.gguf import GGUFTokenizer

    return GGUFTokenizer(llm)


@pytest.fixture(scope="session")
def hmm() -> HMM:
    return HMM.from_pretrained(EXAMPLES / "smollm2-135m")


@pytest.fixture(scope="session")
def goal_of(hmm: HMM, tokenizer: Any) -> Callable[[str], CompiledGoal]:
    """Goals by kind, as in `host_goals`, but of real attributes."""
    attributes = AttributeStore(EXAMPLES / "attributes")
    lighthouse = TokenBytes.of(tokenizer).contains(Contains(("lighthouse",)))
    kinds = {
        "product": [attributes["nontoxic"]],
        "rewards": [attributes["positive"]],
        "two goals": [attributes["nontoxic"], attributes["political"]],
        "required text": [attributes["positive"] & lighthouse],
    }

    compiler = Compiler(hmm, 16)

    def goal_of(kind: str) -> CompiledGoal:
        return compiler.compile([Goal(one, level="strong") for one in kinds[kind]])

    return goal_of
