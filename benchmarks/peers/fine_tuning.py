"""Fine-tuning: the expert of DExperts generates alone."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace.evaluate import Plugin
from peers.experts import EXPERT, expert_identity, load_expert


def build(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, attribute: str) -> Plugin:
    """Build the plug-in from the expert of an attribute."""
    identity = expert_identity(attribute, EXPERT)
    return Plugin(model=load_expert(lm, attribute, EXPERT), identity=identity)
