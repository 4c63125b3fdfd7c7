"""The LM's last hidden states on the texts of both sides, for methods that change only the head."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace.evaluate.continuations import encode_with_bos
from peers.lora import pad_right
from peers.parts import inputs_identity
from peers.sides import Sides

LONGEST = 64  # tokens of a text, as for experts
ROWS = 32
HELD_OUT = 10  # every tenth text of a side is not trained on


@dataclass(frozen=True)
class States:
    """Last hidden states, which do not depend on what changes the head.

    Attributes:
        hidden: The states before every token of all texts, (N, d), in half precision.
        tokens: The tokens, (N,).
        signs: 1 for tokens of texts with the attribute and -1 for others, (N,).
        trained: Whether a token is of a text to train on, (N,); other texts are held out.
        ends: The states after the last token of every text, (texts, d).
        end_signs: The sign of every text, (texts,).
        seconds: The time that the LM took to read the texts.
    """

    hidden: Tensor
    tokens: Tensor
    signs: Tensor
    trained: Tensor
    ends: Tensor
    end_signs: Tensor
    seconds: float


@dataclass(frozen=True)
class StateReader:
    """Reads the texts of both sides once, when a method first needs their states.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        sides: The texts.
        bos_token_id: The token before every text, as in the evaluation.
    """

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sides: Sides
    bos_token_id: int | None

    @property
    def texts(self) -> list[str]:
        """The texts with the attribute, and then those without."""
        return [text for side in self.sides for text in side]

    def identity(self, settings: object) -> str:
        """Return a checksum of the texts, how they are read, and the settings of a fit."""
        return inputs_identity(self.texts, (len(self.sides[0]), LONGEST, HELD_OUT, settings))

    @cached_property
    def states(self) -> States:
        """The states of all texts."""
        start = perf_counter()
        parts = []
        for side, sign in zip(self.sides, (1.0, -1.0), strict=True):
            encoded = encode_with_bos(self.tokenizer, side, self.bos_token_id)
            rows = [ids[:LONGEST] for ids in encoded if len(ids) > 1]
            parts += [
                self._read(rows[at : at + ROWS], sign, at) for at in range(0, len(rows), ROWS)
            ]
        hidden, tokens, signs, trained, ends, end_signs = (
            torch.cat(tensors) for tensors in zip(*parts, strict=True)
        )
        seconds = perf_counter() - start
        return States(hidden, tokens, signs, trained, ends, end_signs, seconds)

    @torch.no_grad()
    def _read(self, rows: Sequence[Sequence[int]], sign: float, first: int) -> tuple[Tensor, ...]:
        """Return all tensors of `States` for a batch, whose first text has a number."""
        ids, mask = pad_right(rows)
        read: Tensor = self.lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        known = mask[:, 1:].bool()
        number = torch.arange(first, first + len(rows))
        trained = (number % HELD_OUT != HELD_OUT - 1)[:, None].expand_as(known)[known]
        hidden, tokens = read[:, :-1][known].half(), ids[:, 1:][known]
        ends = read[torch.arange(len(rows)), mask.sum(1) - 1].float()
        signs = torch.full((len(tokens),), sign)
        return hidden, tokens, signs, trained, ends, torch.full((len(rows),), sign)
