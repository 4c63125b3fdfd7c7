"""The interface between the playground's page and the language model that generates texts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foretrace.chat import Prompt
from foretrace.cli.token_table import TokenTable

MAX_LISTED_GOALS = 1_000  # entries of the page's drop-down list


@dataclass(frozen=True)
class PlaygroundRequest:
    """The values of the page's form."""

    prompt: Prompt
    """A text to continue, or the messages of a chat."""
    goal: str
    level: str = "medium"
    strength: float | None = None
    """Instead of a level."""
    transform: str = ""
    """The paper's transform, SCALE,SHIFT, instead of a level; empty if there is none."""
    horizon: int = 64
    neutral_end: bool = True
    max_new_tokens: int = 40
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class PlaygroundResult:
    """A generated text, which may be incomplete; if the backend explains it, with its tokens."""

    text: str
    table: TokenTable | None = None
    probability: float | None = None
    """The probability of the goal's attribute in the text."""
    price: float | None = None
    """The mean price of steering, in nats per token."""


OnText = Callable[[str], None]


class Backend(Protocol):
    """Generates texts for the page."""

    def goals(self) -> list[str]:
        """List the goals to choose from."""

    def can_chat(self) -> bool:
        """Return whether the language model has a chat template."""

    def generate(
        self, request: PlaygroundRequest, steered: bool, on_text: OnText
    ) -> PlaygroundResult:
        """Generate a text; call `on_text` with the text generated so far."""


def list_goals(folder: Path) -> list[str]:
    """List the attributes of a folder as expressions, up to the limit of the page's list."""
    from foretrace.attribute import AttributeStore, as_expression

    return [as_expression(name) for name in sorted(AttributeStore(folder))[:MAX_LISTED_GOALS]]
