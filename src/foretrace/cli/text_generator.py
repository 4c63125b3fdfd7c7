"""Generate continuations of prompts, steered or unsteered, with streaming."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.chat import Prompt
    from foretrace.cli.goal_options import LoadedGoals


@dataclass(frozen=True)
class Generation:
    """A generated text, and what it cost to steer it."""

    text: str
    probability: tuple[float, ...] = ()
    """The probability of the attribute of each goal; empty without goals, and if their window has
    not begun."""
    price: float | None = None
    """The mean price of steering, in nats per token; None for an unsteered text."""
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class TextGenerator:
    """Generates continuations of prompts, steered or unsteered, from the same seed."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    goals: "LoadedGoals | None"
    options: dict[str, Any]
    """Keyword arguments of `model.generate`."""

    def generate(
        self,
        prompts: "Sequence[Prompt]",
        seed: int,
        *,
        steered: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Generation]:
        """Generate a continuation of each text, and an answer to each chat.

        If there is a single prompt, `on_text` is called with the generated text after each token.
        """
        import torch

        from foretrace.engines.prompts import hmm_ends
        from foretrace.engines.transformers import (
            SteeringProcessor,
            decode_after,
            encode_prompts,
            generate_tokens,
            stop_tokens,
            turn_ends,
        )
        from foretrace.engines.transformers.batch import pad_left

        torch.manual_seed(seed)
        goal = None if self.goals is None else self.goals.goal
        steered = steered and goal is not None
        encoded = encode_prompts(self.tokenizer, prompts, goal)
        ends = stop_tokens(
            self.lm.generation_config, [*hmm_ends(goal), *turn_ends(self.tokenizer, prompts)]
        )
        streamer = _TextStreamer(self.tokenizer, on_text) if on_text and len(prompts) == 1 else None
        prices: list[Tensor] = []
        processor = SteeringProcessor(
            goal if steered else None,
            prompt_mask=pad_left(encoded, 0)[1],
            max_new_tokens=self.options["max_new_tokens"],
            stop_ids=ends,
            on_price=prices.append,
        )
        rows = generate_tokens(
            self.lm,
            self.tokenizer,
            encoded,
            eos_token_id=ends,
            streamer=streamer,
            logits_processor=[processor],
            **self.options,
        )
        by_row = torch.stack(prices, 1).tolist() if prices else [[]] * len(rows)
        return [
            Generation(
                decode_after(self.tokenizer, prompt_ids, token_ids),
                attribute_probabilities(self.goals, prompt_ids, token_ids, ends),
                sum(by_row[row][: len(token_ids)]) / len(token_ids) if steered else None,
                prompt_ids,
                token_ids,
            )
            for row, (prompt_ids, token_ids) in enumerate(zip(encoded, rows, strict=True))
        ]


def attribute_probabilities(
    goals: "LoadedGoals | None",
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    ends: Sequence[int],
) -> tuple[float, ...]:
    """Return the probability of each attribute in the part of the text that goals are about."""
    span = None if goals is None else goals.goal.window.span(prompt_ids, token_ids)
    if goals is None or span is None:
        return ()
    tokens = [token for token in token_ids[span] if token not in ends]
    return tuple(float(one.probability([tokens])[0]) for one in goals.attributes)


def report_text(text: str, on_text: Callable[[str], None]) -> None:
    """Report a text, unless the next token completes its last character."""
    if not text.endswith("\N{REPLACEMENT CHARACTER}"):
        on_text(text)


class _TextStreamer:
    """A streamer of transformers that reports the generated text after each token."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", on_text: Callable[[str], None]
    ) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.prompt_ids: list[int] | None = None
        self.token_ids: list[int] = []

    def put(self, value: "Tensor") -> None:
        """Receive the token ids of the prompt, then each generated one."""
        from foretrace.engines.transformers import decode_after

        if self.prompt_ids is None:
            self.prompt_ids = value.flatten().tolist()
            return
        self.token_ids += value.flatten().tolist()
        report_text(decode_after(self.tokenizer, self.prompt_ids, self.token_ids), self.on_text)

    def end(self) -> None:
        """Do nothing: `TextGenerator.generate` returns the complete text."""
