"""Fast top-p sampling of many continuations for each prompt.

Texts have the same distribution as with `generate` in transformers, `top_p` and
`num_return_sequences`. The prompt is processed once for all continuations, without sorting the
vocabulary. The result has the log-probability and the price of each continuation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretrace.engines.prompts import Goals
from foretrace.engines.transformers.batch import LMBatch, cut_at_end, pad_left
from foretrace.engines.transformers.nucleus import draw_nucleus, token_nats
from foretrace.engines.transformers.processor import SteeringProcessor
from foretrace.steering.price import prices

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Drawn(NamedTuple):
    """A continuation with its end-of-text token, and its log-probability when it was sampled."""

    tokens: list[int]
    log_probability: float
    bare_nats: list[float]
    """The negative log-probability of each token before steering, without a nucleus."""
    price: float = 0.0
    """Mean KL(steered || bare) of the next token over the continuation, in nats; 0 if bare."""


@dataclass(frozen=True)
class Sampler:
    """Sample continuations from a language model, steered or bare, by top-p.

    Args:
        model: A causal LM of transformers.
        ends: Tokens that end a text.
        max_new_tokens: Tokens to generate at most.
        top_p: Probability of the nucleus.

    Example:
        >>> from foretrace.engines.transformers.sampler import Sampler
        >>> sampler = Sampler(model, ends=[0], max_new_tokens=4)
        >>> continuations = sampler.draw([[5, 6], [7]], copies=3)
        >>> [len(row) for row in continuations]
        [3, 3]
    """

    model: "PreTrainedModel"
    ends: Sequence[int]
    max_new_tokens: int = 20
    top_p: float = 0.9

    @torch.inference_mode()
    def draw(
        self, prompts: Sequence[Sequence[int]], copies: int, goal: Goals = None
    ) -> list[list[Drawn]]:
        """Sample continuations.

        Args:
            prompts: Token ids of each prompt.
            copies: Continuations of each prompt.
            goal: The goal of all prompts, or a goal or None for each prompt.

        Returns:
            For each prompt, its continuations.
        """
        ids, mask = pad_left(prompts, 0)
        processor = self.processor(goal, prompts, mask)
        rows, ids = LMBatch(self.model, prompts, copies), ids.repeat_interleave(copies, 0)
        start, log_probabilities, bare_nats, spent = ids.shape[1], [], [], []
        ended = torch.zeros(len(ids), dtype=torch.bool)
        ends = torch.tensor(list(self.ends), dtype=torch.long)
        for left in reversed(range(self.max_new_tokens)):
            steered = processor(ids, rows.logits)
            tokens, nats = draw_nucleus(steered, self.top_p)
            bare_nats.append(token_nats(rows.logits, tokens).cpu())
            tokens, nats = tokens.cpu(), nats.cpu()
            log_probabilities.append(nats.masked_fill(ended, 0.0))
            if steered is not rows.logits:
                spent.append(prices(rows.logits, steered).cpu().masked_fill_(ended, 0.0))
            ids = torch.cat([ids, tokens[:, None]], 1)
            ended |= torch.isin(tokens, ends)
            if left == 0 or bool(ended.all()):
                break
            rows.append(tokens)
        totals = torch.stack(log_probabilities).sum(0).tolist()
        texts = [cut_at_end(row, self.ends) for row in ids[:, start:].tolist()]
        token_rows = torch.stack(bare_nats, 1).tolist()
        nats_spent = torch.stack(spent).sum(0).tolist() if spent else [0.0] * len(texts)
        drawn = [
            Drawn(text, total, nats[: len(text)], price / len(text))
            for text, total, nats, price in zip(texts, totals, token_rows, nats_spent, strict=True)
        ]
        return [drawn[i : i + copies] for i in range(0, len(drawn), copies)]

    def processor(
        self, goal: Goals, prompts: Sequence[Sequence[int]], mask: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function that maps (ids of the rows so far, logits) to steered logits.

        A subclass can override it to try another way of steering.
        """
        return SteeringProcessor(
            goal, prompt_mask=mask, max_new_tokens=self.max_new_tokens, stop_ids=self.ends
        )
