"""Generate continuations of prompts, steered or unsteered, with streaming."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.chat import Prompt
    from foretrace.cli.goal_options import LoadedGoals


@dataclass(frozen=True)
class Generation:
    """A generated text, and what it cost to steer it."""

    text: str
    probability: tuple[float, ...] = ()
    """The probability of the attribute of each goal; empty without goals, and if their window has
    not begun."""
    price: float | None = None
    """The mean price of steering, in nats per token; None for an unsteered text."""
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class TextGenerator:
    """Generates continuations of prompts, steered or unsteered, from the same seed."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    goals: "LoadedGoals | None"
    options: dict[str, Any]
    """Keyword arguments of `generate_priced`: the limit and how to sample."""

    def generate(
        self,
        prompts: "Sequence[Prompt]",
        seed: int,
        *,
        steered: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Generation]:
        """Generate a continuation of each text, and an answer to each chat.

        If there is a single prompt, `on_text` is called with the generated text after each token.
        """
        from foretrace.engines.transformers.priced import generate_priced

        texts = generate_priced(
            self.lm,
            self.tokenizer,
            prompts,
            None if self.goals is None else self.goals.goal,
            seed=seed,
            steered=steered,
            on_text=on_text,
            **self.options,
        )
        return [
            Generation(
                one.text,
                attribute_probabilities(self.goals, one.prompt_ids, one.token_ids, one.stop_ids),
                one.price,
                one.prompt_ids,
                one.token_ids,
            )
            for one in texts
        ]


def attribute_probabilities(
    goals: "LoadedGoals | None",
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    ends: Sequence[int],
) -> tuple[float, ...]:
    """Return the probability of each attribute in the part of the text that goals are about."""
    from foretrace.engines.prompts import probabilities

    if goals is None:
        return ()
    return probabilities(goals.attributes, goals.goal.window, prompt_ids, token_ids, ends)
