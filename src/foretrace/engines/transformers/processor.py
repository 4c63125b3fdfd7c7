"""A logits processor for `generate` of transformers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from foretrace.engines.prompts import Goals
from foretrace.errors import InvalidInputError
from foretrace.steering import Goal, PrefixTracker, Request
from foretrace.steering.goal import common_hmm
from foretrace.steering.merge_goals import merge_goals
from foretrace.steering.transfer import to_device


class SteeringProcessor(LogitsProcessor):
    """Steer `model.generate`: sampling, greedy search, beam search, batches padded on the left.

    One object serves any number of calls with prompts of the same shape.

    Args:
        goals: The goals of every row, or a sequence of goals for each prompt. The latter may be
            empty: such a prompt is not steered. Several goals without a transform are one product,
            and have one lookahead table; their windows must be the same.
        prompt_mask: Attention mask of the prompts, (prompts, T); 0 where padded.
        max_new_tokens: Tokens to generate at most. The lookahead covers what remains of them.
        ends: Tokens that end a text, in addition to the HMM's.
        observe: Called at every step with the price of every row, (rows,): the KL divergence of the
            steered from the bare next-token distribution in nats, 0 for rows that are not steered.
            By default, prices are not computed.

    Raises:
        InvalidInputError: The goals have different HMMs, cannot be merged, or do not fit the
            prompts.

    Example:
        >>> from transformers import LogitsProcessorList
        >>> goal = ft.Goal(ft.Lookahead(hmm, attribute, horizon=8), strength=2.0)
        >>> inputs = tokenizer(["hello"], return_tensors="pt")
        >>> processor = ft.transformers.SteeringProcessor(
        ...     [goal], prompt_mask=inputs["attention_mask"], max_new_tokens=4
        ... )
        >>> output = model.generate(
        ...     inputs["input_ids"],
        ...     attention_mask=inputs["attention_mask"],
        ...     max_new_tokens=4,
        ...     do_sample=False,
        ...     logits_processor=LogitsProcessorList([processor]),
        ... )
        >>> output.shape[0]
        1
    """

    def __init__(
        self,
        goals: Goals,
        *,
        prompt_mask: Tensor,
        max_new_tokens: int,
        ends: Sequence[int] = (),
        observe: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.prompt_mask = prompt_mask.bool().cpu()  # (prompts, T), False where padded
        goals_per_prompt = _goals_per_prompt(goals, len(prompt_mask))
        self.max_new_tokens, self.ends, self.observe = max_new_tokens, tuple(ends), observe
        hmm = common_hmm(goal for row in goals_per_prompt for goal in row)
        self.goals = [merge_goals(row) for row in goals_per_prompt]
        observe_steered = None if observe is None else self._observe
        self.tracker = None if hmm is None else PrefixTracker(hmm, observe=observe_steered)
        self.prompts: Tensor | None = None
        self.requests: list[Request] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Reweight the next token of each row.

        Args:
            input_ids: Prompts and generated tokens, (rows, length).
            scores: Logits of the next token, (rows, V).

        Returns:
            The steered logits, (rows, V).

        Raises:
            InvalidInputError: The rows are not those of the prompts the processor was made for.
        """
        if self.tracker is None:
            return scores
        count, length = self.prompt_mask.shape
        if len(input_ids) % count or input_ids.shape[1] < length:
            raise InvalidInputError(
                f"The processor was made for {count} prompts of {length} tokens, but gets ids of "
                f"shape {tuple(input_ids.shape)}. Make one for these prompts."
            )
        copies = len(input_ids) // count  # beams, or sequences to return
        ids = input_ids.cpu()
        prompts = ids[::copies, :length]
        if self.prompts is None or not torch.equal(prompts, self.prompts):
            self.prompts, self.requests = prompts, self._requests(prompts)
        rows = [request for request in self.requests for _ in range(copies)]
        self.tracker.step(rows, ids[:, length:].tolist())
        return self.tracker.reweight(scores)

    def _observe(self, prices: Tensor, is_steered: Tensor) -> None:
        """Pass the prices of all rows on, from those of the rows with goals."""
        assert self.tracker is not None
        assert self.observe is not None
        rows = [row for row in self.tracker.rows if row is not None]
        all_prices = prices.new_zeros(len(self.tracker.rows))
        all_prices[to_device(rows, prices.device)] = prices
        self.observe(all_prices)

    def _requests(self, prompts: Tensor) -> list[Request]:
        return [
            Request(goals, tuple(prompt[mask].tolist()), self.max_new_tokens, ends=self.ends)
            for goals, prompt, mask in zip(self.goals, prompts, self.prompt_mask, strict=True)
        ]


def _goals_per_prompt(goals: Goals, count: int) -> list[tuple[Goal, ...]]:
    shared = [goal for goal in goals if isinstance(goal, Goal)]
    if len(shared) == len(goals):
        return [tuple(shared)] * count
    per_prompt = [tuple(row) for row in goals if not isinstance(row, Goal)]
    if shared or len(per_prompt) != count:
        raise InvalidInputError(
            f"Pass goals for all rows, [goal, ...], or a list for each of the {count} prompts, "
            f"[[goal, ...], [], ...]. The list has {len(goals)} items."
        )
    return per_prompt
