"""A unigram HMM: the frequencies of an LM's tokens, for steering without a distilled HMM."""

from typing import TYPE_CHECKING

import torch

from foretrace.distill.sampling.source import public_name
from foretrace.engines.prompts import start_ids
from foretrace.engines.transformers.calibration import OPENING_TOKENS, OnStage, openings, silent
from foretrace.engines.transformers.generation import stop_tokens
from foretrace.hmm import HMM
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.inference_mode()
def unigram_hmm(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    length: int = OPENING_TOKENS,
    seed: int = 0,
    on_progress: OnStage = silent,
) -> HMM:
    """Measure the frequencies of an LM's tokens, as an HMM with one state.

    Goals then weigh the next token alone, and a required text is placed by the frequencies of its
    tokens. The LM begins 32 texts. The frequencies are the mean of its next-token distributions
    over their first tokens. Eight take seconds, and suffice to steer. Price-aware rewards gain by
    more.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer.
        length: The number of tokens of each text.
        seed: The random seed.
        on_progress: Called with stage, done, total and unit.

    Returns:
        The HMM, on the device of the LM.

    Raises:
        InvalidInputError: The tokenizer has no token to begin a text.

    Example:
        >>> from foretrace.engines.transformers import unigram_hmm
        >>> unigram_hmm(model, tokenizer)
        HMM(1 state, 374 tokens, dense transition, dense emission, float32, cpu)
    """
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ends = [*dict.fromkeys([*own, *stop_tokens(model.generation_config, ())])]
    name = model.name_or_path
    total = torch.zeros(1, device=model.device)
    start = start_ids(tokenizer, ends)
    steps = openings(model, start, ends=ends, length=length, top_p=1.0, seed=seed)
    for done, (logits, _) in enumerate(steps, 1):
        total = total + logits.softmax(-1).mean(0)
        on_progress("token frequencies", done, length, "tokens")
    return HMM.unigram(
        total,
        eos_token_ids=ends,
        tokenizer_fingerprint=fingerprint(tokenizer.get_vocab()),
        source_model=public_name(name) if name else None,
    )
