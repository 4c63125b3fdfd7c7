"""Many continuations of each prompt, fast: the prompt is read once, and no vocabulary is sorted.

What `generate` of transformers would draw with `top_p` and `num_return_sequences`, and beside it
the probability of all that was drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretrace.engines.transformers import (
    Goals,
    SteeringProcessor,
    left_padded,
    placed,
    to_the_end,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIKELIEST = 1024  # tokens that hold the nucleus almost always


class Drawn(NamedTuple):
    """A continuation, with its end of text, and its log-probability under what drew it."""

    tokens: list[int]
    log_probability: float


@dataclass(frozen=True)
class Sampler:
    """Draws from a language model, steered or bare, by top-p."""

    model: "PreTrainedModel"
    ends: Sequence[int]
    """Tokens that end a text."""
    max_new_tokens: int = 20
    top_p: float = 0.9

    @torch.inference_mode()
    def draw(
        self, prompts: Sequence[Sequence[int]], copies: int, goals: Goals = ()
    ) -> list[list[Drawn]]:
        """Continue each prompt `copies` times; goals are those of all, or of each prompt."""
        from transformers import DynamicCache

        ids, mask = left_padded(prompts, 0)
        processor = self.processor(goals, prompts, mask)
        cache = DynamicCache()
        logits = self._read(ids, mask, cache).repeat_interleave(copies, 0)
        cache.batch_repeat_interleave(copies)
        ids, mask = ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0)
        start, likely = ids.shape[1], []
        over = torch.zeros(len(ids), dtype=torch.bool)
        ends = torch.tensor(list(self.ends), dtype=torch.long)
        for left in reversed(range(self.max_new_tokens)):
            tokens, nats = draw_nucleus(processor(ids, logits), self.top_p)
            tokens, nats = tokens.cpu(), nats.cpu()
            likely.append(nats.masked_fill(over, 0.0))
            ids = torch.cat([ids, tokens[:, None]], 1)
            over |= torch.isin(tokens, ends)
            if left == 0 or bool(over.all()):
                break
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            logits = self._read(tokens[:, None], mask, cache)
        totals = torch.stack(likely).sum(0).tolist()
        rows = [to_the_end(row, self.ends) for row in ids[:, start:].tolist()]
        found = [Drawn(*each) for each in zip(rows, totals, strict=True)]
        return [found[at : at + copies] for at in range(0, len(found), copies)]

    def processor(
        self, goals: Goals, prompts: Sequence[Sequence[int]], mask: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Give what changes logits, (rows, V), by the ids of rows so far; to try another way."""
        return SteeringProcessor(
            goals, prompt_mask=mask, max_new_tokens=self.max_new_tokens, ends=self.ends
        )

    def _read(self, ids: Tensor, mask: Tensor, cache: object) -> Tensor:
        """Let the LM read more tokens, and give the logits of the next: (rows, V) float32."""
        given = placed(ids, mask, self.model.device)
        read = self.model(**given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = read.logits[:, -1]
        return logits.float()


def draw_nucleus(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Draw from the likeliest tokens that have the probability `top_p`: tokens, log-probabilities.

    (rows, V) -> (rows,), (rows,). Exact: rows whose nucleus is larger than usual are sorted whole.
    """
    total = logits.logsumexp(-1, keepdim=True)
    likeliest, tokens = logits.topk(min(LIKELIEST, logits.shape[1]))
    drawn = _draw(likeliest, tokens, total, top_p)
    wide = (likeliest - total).exp().sum(-1) < top_p
    if bool(wide.any()):
        falling, order = logits[wide].sort(descending=True)
        for whole, part in zip(drawn, _draw(falling, order, total[wide], top_p), strict=True):
            whole[wide] = part
    return drawn


def _draw(falling: Tensor, tokens: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Draw from sorted logits, as long as those before have less than `top_p`."""
    probability = (falling - total).exp()
    before = probability.cumsum(-1) - probability
    kept = falling.masked_fill(before >= top_p, -torch.inf).log_softmax(-1)
    chosen = torch.multinomial(kept.exp(), 1)
    return tokens.gather(1, chosen)[:, 0], kept.gather(1, chosen)[:, 0]
