"""SmolLM2 with the HMM and the attributes of `examples/`, in float32."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretrace as ft
from foretrace.engines.transformers import stop_tokens
from smollm2 import find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
HORIZON = 64


@dataclass(frozen=True)
class SmallLM:
    """The models, the attributes, and the folder of data."""

    lm: Any
    tokenizer: Any
    hmm: ft.HMM
    store: ft.AttributeStore
    data: Path

    @classmethod
    def load(cls) -> Self:
        """Load it; FORETRACE_DATA names the folder of data."""
        source = find_smollm2()
        return cls(
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
            AutoTokenizer.from_pretrained(source),
            ft.HMM.from_pretrained(EXAMPLES / "smollm2-135m"),
            ft.AttributeStore(EXAMPLES / "attributes"),
            Path(os.environ["FORETRACE_DATA"]),
        )

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text or a turn."""
        return stop_tokens(self.lm.generation_config, self.hmm.config.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, after the token that begins texts."""
        return [*self.hmm.config.eos_token_ids[:1], *self.tokenizer(text).input_ids]

    def goal(self, attribute: ft.Attribute, level: str) -> ft.CompiledGoal:
        """Compile a goal."""
        return ft.Compiler(self.hmm, HORIZON).compile(ft.Goal(attribute, level=level))
