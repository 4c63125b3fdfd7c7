"""Generate texts, steered or bare, with the price of steering and with streaming."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretrace.chat import Prompt
from foretrace.engines.prompts import (
    Goals,
    decode_after,
    encode_prompts,
    hmm_ends,
    report_text,
    turn_ends,
)
from foretrace.engines.transformers.generation import generate_tokens, stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OnText = Callable[[str], None]


@dataclass(frozen=True)
class PricedText:
    """A generated text, and what it cost to steer it."""

    text: str
    price: float | None
    """The mean price of steering, in nats per token; None for an unsteered text."""
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    stop_ids: Sequence[int]
    """The tokens that end a text."""


def generate_priced(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    goal: Goals,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    steered: bool = True,
    on_text: OnText | None = None,
) -> list[PricedText]:
    """Generate a continuation of each text, and an answer to each chat.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer.
        prompts: Texts and chats.
        goal: A compiled goal, or a goal or None for each prompt.
        max_new_tokens: Tokens to generate at most.
        temperature: The sampling temperature; 0 is greedy.
        top_p: The probability of the nucleus.
        seed: The random seed. A steered text equals the bare one up to a token that steering
            changes.
        steered: Whether to steer. If not, texts still end as the steered ones do.
        on_text: If there is a single prompt, called with the generated text after each token.

    Returns:
        A text for each prompt.

    Raises:
        InvalidInputError: As `generate`.
        TokenizerMismatchError: The HMM was made with another tokenizer.
    """
    torch.manual_seed(seed)
    steered = steered and goal is not None
    encoded = encode_prompts(tokenizer, prompts, goal)
    ends = stop_tokens(model.generation_config, [*hmm_ends(goal), *turn_ends(tokenizer, prompts)])
    prices: list[Tensor] = []
    rows = generate_tokens(
        model,
        tokenizer,
        encoded,
        goal=goal if steered else None,
        max_new_tokens=max_new_tokens,
        on_price=prices.append,
        eos_token_id=ends,
        streamer=_TextStreamer(tokenizer, on_text) if on_text and len(prompts) == 1 else None,
        **_sampling(temperature, top_p),
    )
    by_row = torch.stack(prices, 1).tolist() if prices else [[]] * len(rows)
    return [
        PricedText(
            decode_after(tokenizer, prompt_ids, token_ids),
            sum(spent[: len(token_ids)]) / len(token_ids) if steered else None,
            prompt_ids,
            token_ids,
            ends,
        )
        for prompt_ids, token_ids, spent in zip(encoded, rows, by_row, strict=True)
    ]


def _sampling(temperature: float, top_p: float) -> dict[str, Any]:
    """Return the keyword arguments of `model.generate` for a temperature and a top-p."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p}


class _TextStreamer:
    """A streamer of transformers that reports the generated text after each token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", on_text: OnText) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.prompt_ids: list[int] | None = None
        self.token_ids: list[int] = []

    def put(self, value: Tensor) -> None:
        """Receive the token ids of the prompt, then each generated one."""
        if self.prompt_ids is None:
            self.prompt_ids = value.flatten().tolist()
            return
        self.token_ids += value.flatten().tolist()
        report_text(decode_after(self.tokenizer, self.prompt_ids, self.token_ids), self.on_text)

    def end(self) -> None:
        """Do nothing: `generate_priced` returns the complete text."""
