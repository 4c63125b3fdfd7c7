"""Explain generated tokens: the text that each adds, and the candidates at each position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.engines.transformers.explain import Choice
    from foretrace.steering import Goal


@dataclass(frozen=True)
class TokenTable:
    """A generated text, token by token."""

    pieces: "Sequence[str]"
    """The text that each token adds."""
    choices: "Sequence[Choice]"
    """The candidates at each position, with their probabilities."""
    token_text: Callable[[int], str]
    """Returns the text that a candidate token would add."""


def explain_tokens(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    goals: "Sequence[Goal]",
    *,
    max_new_tokens: int | None,
    candidates: int,
) -> TokenTable:
    """Explain each token after a prompt; `max_new_tokens` is the limit at generation."""
    from foretrace.engines.transformers import decode_after, stop_tokens
    from foretrace.engines.transformers.explain import explain

    @cache
    def token_text(token_id: int) -> str:
        text: str = decode_after(tokenizer, prompt_ids, [token_id])
        return text or str(tokenizer.decode([token_id]))  # special tokens add no text

    choices = explain(
        lm,
        prompt_ids,
        token_ids,
        goals,
        max_new_tokens=max_new_tokens,
        ends=stop_tokens(lm.generation_config, ()),
        candidates=candidates,
    )
    pieces = split_text(lambda prefix: decode_after(tokenizer, prompt_ids, prefix), token_ids)
    return TokenTable(pieces, choices, token_text)


def split_text(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Split a text into one piece per token.

    A token that ends within a multi-byte character adds an empty piece. The token that completes
    the character adds it.
    """
    pieces, shown = [], ""
    for count in range(1, len(token_ids) + 1):
        text = decode(token_ids[:count])
        complete = count == len(token_ids) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        pieces.append(text.removeprefix(shown) if complete else "")
        shown = text if complete else shown
    return pieces
