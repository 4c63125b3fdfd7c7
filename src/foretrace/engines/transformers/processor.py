"""A logits processor for `generate` of transformers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.engines.prompts import Goals, common_hmm
from foretrace.errors import InvalidInputError
from foretrace.steering import CompiledGoal, Request
from foretrace.steering.batch_index import to_device


class SteeringProcessor(LogitsProcessor):
    """Steer `model.generate`: sampling, greedy search, beam search, batches padded on the left.

    One object serves any number of calls with prompts of the same shape.

    Args:
        goal: The goal of all prompts, or a goal or None for each prompt. A prompt without a goal is
            not steered.
        prompt_mask: Attention mask of the prompts, (prompts, T); 0 where padded.
        max_new_tokens: Tokens to generate at most. The lookahead covers what remains of them.
        stop_ids: Tokens that end a text, in addition to the HMM's.
        on_price: Called at every step with the price of every row, (rows,): the KL divergence of
            the steered from the bare next-token distribution in nats, 0 for rows that are not
            steered. By default, prices are not computed.

    Raises:
        InvalidInputError: The goals have different HMMs, or do not fit the prompts.

    Example:
        >>> from transformers import LogitsProcessorList
        >>> goal = ft.Compiler(hmm, horizon=8).compile(ft.Goal(attribute, strength=2.0))
        >>> inputs = tokenizer(["hello"], return_tensors="pt")
        >>> processor = ft.transformers.SteeringProcessor(
        ...     goal, prompt_mask=inputs["attention_mask"], max_new_tokens=4
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
        goal: Goals,
        *,
        prompt_mask: Tensor,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        on_price: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.prompt_mask = prompt_mask.bool().cpu()  # (prompts, T), False where padded
        self.goals = _goal_per_prompt(goal, len(prompt_mask))
        self.max_new_tokens, self.stop_ids = max_new_tokens, tuple(stop_ids)
        self.on_price = on_price
        hmm = common_hmm(self.goals)
        self.tracker = None if hmm is None else PrefixTracker(hmm)
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
            InvalidInputError: The processor was made for other prompts.
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
        steered = scores.detach().clone()
        prices = self.tracker.reweight_(steered, measure=self.on_price is not None)
        if self.on_price is not None and prices is not None:
            used = [row for row in self.tracker.rows if row is not None]
            all_prices = prices.nats.new_zeros(len(rows))
            all_prices[to_device(used, all_prices.device)] = prices.nats
            self.on_price(all_prices)
        return steered

    def _requests(self, prompts: Tensor) -> list[Request]:
        return [
            Request(goal, tuple(prompt[mask].tolist()), self.max_new_tokens, None, self.stop_ids)
            for goal, prompt, mask in zip(self.goals, prompts, self.prompt_mask, strict=True)
        ]


def _goal_per_prompt(goal: Goals, count: int) -> list[CompiledGoal | None]:
    if goal is None or isinstance(goal, CompiledGoal):
        return [goal] * count
    wrong = [type(one).__name__ for one in goal if not isinstance(one, CompiledGoal | None)]
    if wrong or len(goal) != count:
        what = f"a {wrong[0]} is among them" if wrong else f"the list has {len(goal)} items"
        raise InvalidInputError(
            f"Pass one compiled goal, or a list of a goal or None for each of the {count} prompts; "
            f"{what}. Compiler(hmm).compile(goals) makes one of several goals."
        )
    return list(goal)
