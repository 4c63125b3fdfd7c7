"""DExperts (Liu et al. 2021): add the difference of an expert's and an anti-expert's logits."""

from torch import Tensor, inf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace.evaluate import Plugin
from foretrace.evaluate.plugin import LogitsProcessor, Prompts
from peers.experts import ANTI_EXPERT, EXPERT, expert_identity, load_expert
from peers.second_model import SecondModel

TOP_K = 1024  # tokens at most that are left by the filter


def build(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attribute: str,
    alpha: float,
    filter_p: float = 0.9,
) -> Plugin:
    """Build the plug-in.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        attribute: The attribute whose experts are used.
        alpha: The factor of the difference of the experts.
        filter_p: The nucleus of the LM. Other tokens are excluded before the logits are combined.
            Tokens are then drawn from all that are left, as in the authors' code. 1 excludes none;
            tokens are then drawn from the nucleus of the combination.
    """
    expert = load_expert(lm, attribute, EXPERT)
    anti_expert = load_expert(lm, attribute, ANTI_EXPERT)

    def processor(prompts: Prompts) -> LogitsProcessor:
        towards, away = SecondModel(expert, prompts), SecondModel(anti_expert, prompts)

        def combine(ids: Tensor, logits: Tensor) -> Tensor:
            difference = towards.next_logits(ids) - away.next_logits(ids)
            return keep_nucleus(logits, filter_p).add_(difference, alpha=alpha)

        return combine

    identity = expert_identity(attribute, EXPERT, ANTI_EXPERT)
    return Plugin(processor=processor, top_p=1.0 if filter_p < 1 else None, identity=identity)


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Exclude tokens outside the nucleus, and the least likely of more than TOP_K: (n, V)."""
    if top_p >= 1:
        return logits.clone()
    top = logits.topk(min(TOP_K, logits.shape[1])).values
    probability = (top - logits.logsumexp(-1, keepdim=True)).exp()
    inside = probability.cumsum(-1) - probability < top_p
    smallest = top.masked_fill(~inside, inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < smallest, -inf)
