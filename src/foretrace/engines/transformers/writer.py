"""Texts that a language model of transformers writes, to fit attributes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from foretrace.chat import Prompt, is_chat
from foretrace.engines.prompts import decode_after, encode_prompts, turn_ends
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


@dataclass(frozen=True)
class LMWriter:
    """Writes texts by a language model of transformers, by top-p sampling.

    Attributes:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer. Without a chat template, the last message of a chat is put into a
            plain text with two examples, and the answer ends at the end of its line.
        name: The name of the model.
        ends: Tokens that end a text, besides the model's own.

    Example:
        >>> from foretrace.engines.transformers.writer import LMWriter
        >>> writer = LMWriter(model, tokenizer, "my-lm")
        >>> len(writer.write(["hello", "hello"], seed=0))
        2
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    name: str
    ends: Sequence[int] = ()

    def write(self, prompts: Sequence[Prompt], seed: int) -> list[Written]:
        """Continue texts and answer chats: one text for each.

        Args:
            prompts: The prompts. A prompt that follows itself is read once.
            seed: The random seed.

        Returns:
            The texts.
        """
        groups = [(prompt, len(list(group))) for prompt, group in groupby(prompts)]
        copies = {count for _, count in groups}
        if len(copies) > 1:
            groups, copies = [(prompt, 1) for prompt in prompts], {1}
        plain = not self.tokenizer.chat_template
        rendered = [_as_text(prompt) if plain else prompt for prompt, _ in groups]
        encoded = encode_prompts(self.tokenizer, rendered)
        ends = [*stop_tokens(self.model.generation_config, self.ends)]
        ends += turn_ends(self.tokenizer, rendered)
        torch.manual_seed(seed)
        drawn = Sampler(self.model, ends, MAX_NEW_TOKENS, TOP_P).draw(encoded, copies.pop())
        written = []
        for (prompt, _), ids, continuations in zip(groups, encoded, drawn, strict=True):
            for continuation in continuations:
                text = decode_after(self.tokenizer, ids, continuation.tokens)
                finished = continuation.tokens[-1] in ends
                if plain and is_chat(prompt):
                    text, newline, _ = text.strip().partition("\n")
                    finished = finished or bool(newline)
                written.append(Written(text, finished))
        return written


def _as_text(prompt: Prompt) -> str:
    """Return a chat as a plain text; leave a text as it is."""
    return PLAIN_CHAT.format(instruction=prompt[-1]["content"]) if is_chat(prompt) else str(prompt)
