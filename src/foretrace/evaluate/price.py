"""The mean price of steering a language model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretrace.engines.transformers.sampler import Sampler
from foretrace.steering import Goal


@dataclass(frozen=True)
class PriceSampler:
    """Measures the price of steering: KL(steered || bare) of the next token, in nats per token.

    Every measurement uses the same prompts and the same seed, so that prices of different goals
    can be compared.

    Attributes:
        sampler: The language model with its sampling settings.
        prompts: The token ids of each prompt.
        copies: The number of continuations of each prompt.
        rows: The number of sequences in a batch.
        seed: The seed of sampling.

    Example:
        >>> from foretrace.engines.transformers.sampler import Sampler
        >>> from foretrace.evaluate.price import PriceSampler
        >>> meter = PriceSampler(Sampler(model, ends=[0], max_new_tokens=4), [[5, 6], [7]])
        >>> goal = ft.Goal(ft.Lookahead(hmm, attribute, horizon=4), strength=2.0)
        >>> meter.price([[goal], [goal]]) > 0
        True
    """

    sampler: Sampler
    prompts: Sequence[Sequence[int]]
    copies: int = 4
    rows: int = 250
    seed: int = 0

    def price(self, goals: Sequence[Sequence[Goal]]) -> float:
        """Measure the mean price of a generated token.

        Args:
            goals: The goals of each prompt.

        Returns:
            Nats per token.
        """
        torch.manual_seed(self.seed)
        prompts_per_batch = max(1, self.rows // self.copies)
        nats, num_tokens = 0.0, 0
        for start in range(0, len(self.prompts), prompts_per_batch):
            batch = slice(start, start + prompts_per_batch)
            for continuations in self.sampler.draw(self.prompts[batch], self.copies, goals[batch]):
                nats += sum(text.price * len(text.tokens) for text in continuations)
                num_tokens += sum(len(text.tokens) for text in continuations)
        return nats / max(1, num_tokens)
