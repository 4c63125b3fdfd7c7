"""Writing after prompts, steered or bare, and telling of it as it goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.steering import Goal


@dataclass(frozen=True)
class Written:
    """What was written after a prompt, and the probability of each goal's attribute in it."""

    text: str
    probability: tuple[float, ...]
    prompt: Sequence[int] = ()
    tokens: Sequence[int] = ()


@dataclass(frozen=True)
class Writer:
    """Writes after prompts, steered or bare, from the same seed."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    goals: "list[Goal]"
    options: dict[str, Any]

    def write(
        self,
        prompts: Sequence[str],
        seed: int,
        *,
        steered: bool = True,
        show: Callable[[str], None] | None = None,
    ) -> list[Written]:
        """Write; `show` is told the text so far, of a single prompt."""
        import torch

        from foretrace.engines.transformers import (
            decode_after,
            encode_prompts,
            generate_tokens,
            stop_tokens,
        )

        torch.manual_seed(seed)
        encoded = encode_prompts(self.tokenizer, prompts, self.goals)
        known = self.goals[0].lookahead.hmm.config.eos_token_ids
        ends = stop_tokens(self.lm.generation_config, known)
        streamer = _Stream(self.tokenizer, show) if show and len(prompts) == 1 else None
        tokens = generate_tokens(
            self.lm,
            self.tokenizer,
            encoded,
            goal=self.goals if steered else None,
            eos_token_id=ends,
            streamer=streamer,
            **self.options,
        )
        texts = [decode_after(self.tokenizer, *each) for each in zip(encoded, tokens, strict=True)]
        counted = [[token for token in row if token not in ends] for row in tokens]
        likely = [goal.lookahead.attribute.probability(counted) for goal in self.goals]
        return [
            Written(text, tuple(float(each[row]) for each in likely), encoded[row], tokens[row])
            for row, text in enumerate(texts)
        ]


class _Stream:
    """Hears from transformers what is written, token by token, and tells the text so far."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", show: Callable[[str], None]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.prompt: list[int] | None = None  # until it has come
        self.tokens: list[int] = []

    def put(self, value: "Tensor") -> None:
        """Take the prompt, then each next token."""
        from foretrace.engines.transformers import decode_after

        if self.prompt is None:
            self.prompt = value.flatten().tolist()
            return
        self.tokens += value.flatten().tolist()
        text = decode_after(self.tokenizer, self.prompt, self.tokens)
        if not text.endswith("�"):  # half of a character: the rest comes with the next token
            self.show(text)

    def end(self) -> None:
        """Hear that it is over: the text is given as a whole anyway."""
