"""Explain generated tokens: the text that each adds, and the candidates at each position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from statistics import fmean
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
    relative: frozenset[int] = frozenset()
    """The goals with evidence, whose EAP is relative to its mean over the LM's next tokens."""

    @property
    def mean_price(self) -> float:
        """The mean price of steering over the positions, in nats per token."""
        return fmean(choice.price for choice in self.choices)

    def on_scale(self, goal: int, eap: float) -> float:
        """Return an EAP as a number from 0 to 1; 0.5 is the mean of a relative one."""
        return eap / (1 + eap) if goal in self.relative else eap

    def shade(self, position: int) -> float:
        """Return how well the token at a position meets the goals, from 0 to 1."""
        eaps = self.choices[position].written.eap
        return prod(self.on_scale(goal, eap) for goal, eap in enumerate(eaps))


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
    relative = (index for index, goal in enumerate(goals) if goal.lookahead.attribute.evidence)
    return TokenTable(pieces, choices, token_text, frozenset(relative))


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
