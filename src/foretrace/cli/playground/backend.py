"""Who writes for the playground, and what they say of it; here a language model in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from foretrace.cli.goal_options import load_goals, sampling
from foretrace.cli.text_generator import Writer
from foretrace.cli.token_table import Account, account_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.hmm import HMM
    from foretrace.steering import Goal

CANDIDATES = 5  # at each place
MOST_GOALS = 1_000  # that a list on a page can hold


@dataclass(frozen=True)
class Wish:
    """What somebody asks for on the page."""

    prompt: str
    goal: str
    strength: float = 1.0
    shift: float = 0.0
    horizon: int = 64
    neutral_end: bool = False
    max_new_tokens: int = 40
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Told:
    """What was written so far, and once it is whole why, if the author knows."""

    text: str
    account: Account | None = None
    probability: float | None = None
    """That the text has the attribute, as the attribute itself sees it."""


Tell = Callable[[str], None]


class Author(Protocol):
    """Whoever can write."""

    def goals(self) -> list[str]:
        """List goals to choose from."""

    def write(self, wish: Wish, steered: bool, tell: Tell) -> Told:
        """Write, steered or bare; `tell` hears the text so far."""


@dataclass
class LocalAuthor:
    """A language model in this process, with its HMM and a folder of attributes."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    hmm: "HMM"
    attributes: Path
    _built: "tuple[Wish, list[Goal]] | None" = None  # of the last wish: a pair of texts shares it

    def goals(self) -> list[str]:
        """List the attributes of the folder."""
        return goals_in(self.attributes)

    def write(self, wish: Wish, steered: bool, tell: Tell) -> Told:
        """Write, and account for every token by the goal, also of a bare text."""
        goals = self._goals(wish)
        limit = {"max_new_tokens": wish.max_new_tokens}
        writer = Writer(self.lm, self.tokenizer, goals, sampling(1.0, wish.top_p) | limit)
        (written,) = writer.write([wish.prompt], wish.seed, steered=steered, show=tell)
        account = account_for(
            self.lm,
            self.tokenizer,
            written.prompt,
            written.tokens,
            goals,
            max_new_tokens=wish.max_new_tokens,
            candidates=CANDIDATES,
        )
        return Told(written.text, account, written.probability[0])

    def _goals(self, wish: Wish) -> "list[Goal]":
        if self._built is None or self._built[0] != wish:
            built = load_goals(
                self.hmm,
                self.tokenizer,
                self.attributes,
                [wish.goal],
                [wish.strength],
                [wish.shift],
                wish.horizon,
                wish.neutral_end,
            )
            self._built = wish, built
        return self._built[1]


def goals_in(folder: Path) -> list[str]:
    """List the attributes of a folder as expressions, so many as a page can show."""
    from foretrace.attribute import AttributeStore, as_expression

    return [as_expression(name) for name in sorted(AttributeStore(folder))[:MOST_GOALS]]
