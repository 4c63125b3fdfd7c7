"""Self-debiasing (Schick et al. 2021): avoid what the LM itself would write if told to."""

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace.evaluate import Plugin
from foretrace.evaluate.plugin import LogitsProcessor, Prompts
from peers.second_model import SecondModel, insert_text

SMALLEST_FACTOR = 0.01  # as in the authors' code, so that no token becomes impossible


def build(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, contrary: str, decay: float
) -> Plugin:
    """Build the plug-in.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        contrary: An instruction that asks for what should be avoided. It is inserted before each
            prompt in the second pass.
        decay: The paper's lambda: how fast the factor of a token falls with the rise of its
            probability under the contrary instruction.
    """
    instruction = tokenizer(contrary, add_special_tokens=False).input_ids
    special = list(tokenizer.all_special_ids)

    def processor(prompts: Prompts) -> LogitsProcessor:
        second = SecondModel(lm, insert_text(prompts, instruction, special))
        return lambda ids, logits: debias(logits, second.next_logits(ids), decay)

    return Plugin(processor=processor)


def debias(logits: Tensor, contrary: Tensor, decay: float) -> Tensor:
    """Lower the logits of tokens that the contrary instruction makes likelier: (n, V) each.

    A token whose probability rises by d is multiplied by exp(-decay * d), the paper's equation 3.
    """
    rise = contrary.softmax(-1) - logits.softmax(-1)
    factors = torch.exp(-decay * rise.clamp_min(0.0)).clamp_min(SMALLEST_FACTOR)
    return logits + factors.log()
