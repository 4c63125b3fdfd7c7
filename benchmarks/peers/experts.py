"""Experts: the LM fine-tuned on one side of an attribute's training data."""

from copy import deepcopy
from functools import cache
from pathlib import Path

from transformers import PreTrainedModel

from peers.parts import checksum, part, require

EXPERT, ANTI_EXPERT = "expert", "anti-expert"


def load_expert(lm: PreTrainedModel, attribute: str, side: str) -> PreTrainedModel:
    """Load the LM with a side's adapter merged into its weights."""
    return _merge(lm, require(part(attribute, side)))


def expert_identity(attribute: str, *sides: str) -> str:
    """Return a checksum of the adapters of sides."""
    adapters = [part(attribute, side) / "adapter_model.safetensors" for side in sides]
    return "-".join(checksum(require(file)) for file in adapters)


@cache  # the points of a curve share their experts
def _merge(lm: PreTrainedModel, folder: Path) -> PreTrainedModel:
    from peft import PeftModel

    merged: PreTrainedModel = PeftModel.from_pretrained(deepcopy(lm), folder).merge_and_unload()
    merged.train(False)
    return merged
