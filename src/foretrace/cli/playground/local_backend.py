"""A backend that runs the language model in this process."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli.goal_options import (
    GoalSettings,
    LoadedGoals,
    load_goals,
    parse_transform,
    sampling_options,
)
from foretrace.cli.playground.backend import (
    OnText,
    PlaygroundRequest,
    PlaygroundResult,
    list_goals,
)
from foretrace.cli.text_generator import TextGenerator
from foretrace.cli.token_table import explain_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.hmm import HMM

CANDIDATES = 5  # per position


@dataclass
class LocalBackend:
    """A language model in this process, its HMM and a folder of attributes."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    hmm: "HMM"
    attributes: Path
    # The unsteered and the steered text of a request share its goals, and so do turns of a chat.
    _last_goals: tuple[PlaygroundRequest, LoadedGoals] | None = None

    def goals(self) -> list[str]:
        """List the attributes of the folder."""
        return list_goals(self.attributes)

    def can_chat(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def generate(
        self, request: PlaygroundRequest, steered: bool, on_text: OnText
    ) -> PlaygroundResult:
        """Generate a text, and explain each token by the goal, also in an unsteered text."""
        goals = self._load_goals(request)
        limit = {"max_new_tokens": request.max_new_tokens}
        sampling = sampling_options(1.0, request.top_p)
        generator = TextGenerator(self.lm, self.tokenizer, goals, sampling | limit)
        (generation,) = generator.generate(
            [request.prompt], request.seed, steered=steered, on_text=on_text
        )
        table = explain_tokens(
            self.lm,
            self.tokenizer,
            generation.prompt_ids,
            generation.token_ids,
            goals.goals,
            max_new_tokens=request.max_new_tokens,
            candidates=CANDIDATES,
        )
        return PlaygroundResult(generation.text, table, generation.probability[0], generation.price)

    def _load_goals(self, request: PlaygroundRequest) -> LoadedGoals:
        request = replace(request, prompt="", seed=0)
        if self._last_goals is None or self._last_goals[0] != request:
            goals = load_goals(
                self.hmm,
                self.tokenizer,
                self.attributes,
                [request.goal],
                _settings(request),
                request.horizon,
            )
            self._last_goals = request, goals
        return self._last_goals[1]


def _settings(request: PlaygroundRequest) -> GoalSettings:
    transforms = [parse_transform(request.transform)] if request.transform else None
    return GoalSettings([request.strength], request.level, transforms, request.neutral_end)
