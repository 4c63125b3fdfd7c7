"""Generate continuations of prompts, steered or unsteered, with streaming."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.steering import Goal


@dataclass(frozen=True)
class Generation:
    """A generated text, and the probability of each goal's attribute in it."""

    text: str
    probability: tuple[float, ...]
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class TextGenerator:
    """Generates continuations of prompts, steered or unsteered, from the same seed."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    goals: "list[Goal]"
    options: dict[str, Any]
    """Keyword arguments of `model.generate`."""

    def generate(
        self,
        prompts: Sequence[str],
        seed: int,
        *,
        steered: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Generation]:
        """Generate a continuation of each prompt.

        If there is a single prompt, `on_text` is called with the generated text after each token.
        """
        import torch

        from foretrace.engines.transformers import (
            decode_after,
            encode_prompts,
            generate_tokens,
            stop_tokens,
        )

        torch.manual_seed(seed)
        encoded = encode_prompts(self.tokenizer, prompts, self.goals)
        eos_token_ids = stop_tokens(
            self.lm.generation_config, self.goals[0].lookahead.hmm.config.eos_token_ids
        )
        streamer = _TextStreamer(self.tokenizer, on_text) if on_text and len(prompts) == 1 else None
        rows = generate_tokens(
            self.lm,
            self.tokenizer,
            encoded,
            goal=self.goals if steered else None,
            eos_token_id=eos_token_ids,
            streamer=streamer,
            **self.options,
        )
        without_end = [[token for token in row if token not in eos_token_ids] for row in rows]
        # (goals, prompts)
        probabilities = [goal.lookahead.attribute.probability(without_end) for goal in self.goals]
        return [
            Generation(
                decode_after(self.tokenizer, prompt_ids, token_ids),
                tuple(float(by_row[row]) for by_row in probabilities),
                prompt_ids,
                token_ids,
            )
            for row, (prompt_ids, token_ids) in enumerate(zip(encoded, rows, strict=True))
        ]


class _TextStreamer:
    """A streamer of transformers that reports the generated text after each token."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", on_text: Callable[[str], None]
    ) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.prompt_ids: list[int] | None = None
        self.token_ids: list[int] = []

    def put(self, value: "Tensor") -> None:
        """Receive token ids: first those of the prompt, then each generated one."""
        from foretrace.engines.transformers import decode_after

        if self.prompt_ids is None:
            self.prompt_ids = value.flatten().tolist()
            return
        self.token_ids += value.flatten().tolist()
        text = decode_after(self.tokenizer, self.prompt_ids, self.token_ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the next token completes the character
            self.on_text(text)

    def end(self) -> None:
        """Do nothing: `TextGenerator.generate` returns the complete text."""
