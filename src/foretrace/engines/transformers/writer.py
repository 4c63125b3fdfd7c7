"""Texts that a language model of transformers writes, to fit attributes to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.chat import Prompt, is_chat
from foretrace.engines.prompts import Goals, decode_after, encode_prompts, turn_ends
from foretrace.engines.transformers.batch import LMBatch
from foretrace.engines.transformers.generation import stop_tokens
from foretrace.engines.transformers.sampler import Sampler
from foretrace.engines.writing import MAX_NEW_TOKENS, TOP_P, Written

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# For language models without a chat template. Examples show what an answer looks like.
PLAIN_CHAT = """\
Instruction: Write one sentence about a lighthouse. It must be: mysterious.
Text: Nobody has lived in the old lighthouse for years, and yet its lamp is lit every night.

Instruction: Write one sentence about a violin. It must be: like a newspaper.
Text: A rare violin was found in a taxi on Monday, and returned to its owner by the police.

Instruction: {instruction}
Text:"""


GUIDANCE = 1.0  # of the difference of log-probabilities under a prompt and its opposite
PLAUSIBLE = 4.0  # nats below the likeliest token under the prompt


@dataclass(frozen=True)
class LMWriter:
    """Writes texts by a language model of transformers, by top-p sampling.

    With opposites, tokens that are likelier under the prompt than under its opposite get a
    higher probability: classifier-free guidance, among tokens that are plausible under the prompt.

    Attributes:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer. Without a chat template, the last message of a chat is put into a
            plain text with two examples, and the answer ends at the end of its line.
        name: The name of the model.
        ends: Tokens that end a text, besides the model's own.
        max_new_tokens: Tokens of a text at most.
        top_p: The probability of the nucleus to sample from.

    Example:
        >>> from foretrace.engines.transformers.writer import LMWriter
        >>> writer = LMWriter(model, tokenizer, "my-lm")
        >>> len(writer.write(["hello", "hello"], None, seed=0))
        2
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    name: str
    ends: Sequence[int] = ()
    max_new_tokens: int = MAX_NEW_TOKENS
    top_p: float = TOP_P

    def write(
        self, prompts: Sequence[Prompt], opposites: Sequence[Prompt] | None, seed: int
    ) -> list[Written]:
        """Continue texts and answer chats: one text for each.

        Args:
            prompts: The prompts. A prompt that follows itself is read once.
            opposites: For each prompt, one that its text should not fit.
            seed: The random seed.

        Returns:
            The texts.
        """
        pairs = zip(prompts, opposites or prompts, strict=True)
        groups = [(pair, len(list(group))) for pair, group in groupby(pairs)]
        copies = groups[0][1]
        if any(count != copies for _, count in groups):
            groups, copies = [(pair, 1) for pair, count in groups for _ in range(count)], 1
        encoded, others = (self._encode([pair[k] for pair, _ in groups]) for k in (0, 1))
        ends = stop_tokens(self.model.generation_config, self.ends)
        if self.tokenizer.chat_template:
            ends += turn_ends(self.tokenizer, prompts)
        sampler = _GuidedSampler(
            self.model,
            ends,
            self.max_new_tokens,
            self.top_p,
            others if opposites else None,
            copies,
        )
        torch.manual_seed(seed)
        drawn = sampler.draw(encoded, copies)
        texts = [
            Written(decode_after(self.tokenizer, ids, one.tokens), one.tokens[-1] in ends)
            for ids, several in zip(encoded, drawn, strict=True)
            for one in several
        ]
        if self.tokenizer.chat_template:
            return texts
        chats = map(is_chat, prompts)
        return [
            _first_line(text) if chat else text for chat, text in zip(chats, texts, strict=True)
        ]

    def _encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        if not self.tokenizer.chat_template:
            prompts = [_as_text(prompt) for prompt in prompts]
        return encode_prompts(self.tokenizer, prompts)


@dataclass(frozen=True)
class _GuidedSampler(Sampler):
    """Samples texts that fit their prompts better than the opposites of these."""

    opposites: Sequence[Sequence[int]] | None = None
    copies: int = 1

    def processor(
        self, goal: Goals, prompts: Sequence[Sequence[int]], mask: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        if self.opposites is None:
            return super().processor(goal, prompts, mask)
        other, start = LMBatch(self.model, self.opposites, self.copies), mask.shape[1]

        def guide(ids: Tensor, logits: Tensor) -> Tensor:
            if ids.shape[1] > start:
                other.append(ids[:, -1])
            log_p = logits.log_softmax(-1)
            guided = log_p + GUIDANCE * (log_p - other.logits.log_softmax(-1))
            implausible = log_p < log_p.max(-1, keepdim=True).values - PLAUSIBLE
            return guided.masked_fill(implausible, -torch.inf)

        return guide


def _first_line(written: Written) -> Written:
    """End a text at the end of its first line."""
    line, newline, _ = written.text.strip().partition("\n")
    return Written(line, written.finished or bool(newline))


def _as_text(prompt: Prompt) -> str:
    """Return a chat as a plain text; leave a text as it is."""
    return PLAIN_CHAT.format(instruction=prompt[-1]["content"]) if is_chat(prompt) else str(prompt)
