"""Why each token of a text, in words: what each adds to it, and what else might have been."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.engines.transformers.explain import Choice
    from foretrace.steering import Goal


@dataclass(frozen=True)
class Account:
    """A text token by token."""

    pieces: "Sequence[str]"
    """What each token adds to the text."""
    choices: "Sequence[Choice]"
    """Why each."""
    shown: Callable[[int], str]
    """What a candidate would add."""


def account_for(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Sequence[int],
    written: Sequence[int],
    goals: "Sequence[Goal]",
    *,
    max_new_tokens: int | None,
    candidates: int,
) -> Account:
    """Account for what was written after a prompt; `max_new_tokens` is what it might have been."""
    from foretrace.engines.transformers import decode_after, stop_tokens
    from foretrace.engines.transformers.explain import explain

    @cache
    def shown(token: int) -> str:
        after: str = decode_after(tokenizer, prompt, [token])
        return after or str(tokenizer.decode([token]))  # special tokens say nothing in a text

    choices = explain(
        lm,
        prompt,
        written,
        goals,
        max_new_tokens=max_new_tokens,
        ends=stop_tokens(lm.generation_config, ()),
        candidates=candidates,
    )
    pieces = split_text(lambda tokens: decode_after(tokenizer, prompt, tokens), written)
    return Account(pieces, choices, shown)


def split_text(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """Split a text into what each token adds; one that ends within a character adds nothing."""
    pieces, before = [], ""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        whole = count == len(tokens) or not text.endswith("�")
        pieces.append(text.removeprefix(before) if whole else "")
        before = text if whole else before
    return pieces
