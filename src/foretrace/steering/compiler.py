"""Compile goals for an HMM: merge them, find the strengths of levels, build tables and automata."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import islice
from operator import and_
from threading import RLock
from typing import TypeVar

from foretrace.attribute import Attribute, LogitAffine
from foretrace.context import Probe
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.lookahead import Lookahead
from foretrace.lookahead.strengths import LevelStrengths
from foretrace.steering.goal import IDENTITY, CompiledGoal, Factor, Goal, require_probe
from foretrace.steering.markers import CompiledMarker, Marker, Window
from foretrace.vocabulary import require_same_fingerprint

DEFAULT_MEMORY = 1 << 30

T = TypeVar("T", Lookahead, CompiledMarker)


class Compiler:
    """Makes compiled goals for one HMM. It keeps tables for goals that are compiled again.

    Args:
        hmm: The HMM of the language model.
        horizon: How many tokens to look ahead after the next one. 0 weighs the next token alone.
        probe: The probe of the language model, for attributes with a context reward.
        memory: How many bytes of tables to keep. The least recently used are dropped first.
        exact: Whether required text has exactly its probability under the HMM. By default, a power
            of it brings the text forward, or leaves its place to the LM if the prompt has the text.

    Example:
        >>> compiler = ft.Compiler(hmm, horizon=8)
        >>> compiled = compiler.compile([ft.Goal(attribute, 2.0), ft.Goal(attribute, 3.0)])
        >>> compiled.factors[0].lookahead.attribute.name
        '(nontoxic ** 2 & nontoxic ** 3)'
    """

    def __init__(
        self,
        hmm: HMM,
        horizon: int = 64,
        probe: Probe | None = None,
        *,
        memory: int = DEFAULT_MEMORY,
        exact: bool = False,
    ) -> None:
        self.hmm, self.horizon, self.probe, self.memory = hmm, horizon, probe, memory
        self.exact = exact
        self._kept: OrderedDict[str, Lookahead | CompiledMarker] = OrderedDict()
        self._strengths = LevelStrengths(hmm)
        self._lock = RLock()

    @property
    def nbytes(self) -> int:
        """The size of the tables and automata that are kept, in bytes."""
        with self._lock:
            return sum(one.nbytes for one in self._kept.values())

    def compile(self, goals: Goal | Sequence[Goal]) -> CompiledGoal:
        """Compile goals for one sequence.

        Goals without a transform become the product of their attributes, with one table for all of
        them. Ends of text are neutral if they are neutral for one of the goals.

        Args:
            goals: One goal or more.

        Returns:
            The compiled goal. It can be used for any number of sequences.

        Raises:
            InvalidInputError: If there is no goal, the goals have different windows, the product
                cannot be steered toward, an attribute or marker does not fit the HMM, or a context
                reward does not fit the probe.
        """
        goals = [goals] if isinstance(goals, Goal) else list(goals)
        if not goals:
            raise InvalidInputError("There is no goal. Name at least one attribute.")
        window = self._window(goals)
        factors = tuple(
            self._factor(attribute, transform) for attribute, transform in self.merge(goals)
        )
        probe = self.probe if any(one.lookahead.has_context for one in factors) else None
        neutral_end = any(goal.neutral_end for goal in goals)
        return CompiledGoal(self.hmm, factors, window, neutral_end, probe)

    def merge(self, goals: Sequence[Goal]) -> list[tuple[Attribute, LogitAffine]]:
        """Return the attributes that goals become, to the power of their strengths.

        The product of all goals without a transform comes first, then each goal with a transform.
        """
        powers = list(zip(self.powers(goals), (goal.transform for goal in goals), strict=True))
        plain = [power for power, transform in powers if transform.is_identity]
        product = [(reduce(and_, plain), IDENTITY)] if plain else []
        return product + [one for one in powers if not one[1].is_identity]

    def powers(self, goals: Sequence[Goal]) -> list[Attribute]:
        """Return the attribute of each goal, to the power of its strength.

        Goals at the same level share its budget: together they cost what one of them would cost
        alone. The factors of a conjunction count as goals of their own.

        Raises:
            InvalidInputError: If there is no such level.
        """
        at_level: dict[str, list[Attribute]] = {}
        for goal in goals:
            if goal.strength is None and goal.transform.is_identity:
                at_level.setdefault(goal.level, []).extend(goal.attribute.factors)
        raised = {
            level: iter(self._strengths.raised(attributes, level))
            for level, attributes in at_level.items()
        }
        return [
            reduce(and_, islice(raised[goal.level], len(goal.attribute.factors)))
            if goal.strength is None and goal.transform.is_identity
            else goal.attribute ** (goal.strength or 1.0)
            for goal in goals
        ]

    def _factor(self, attribute: Attribute, transform: LogitAffine) -> Factor:
        require_probe(attribute, self.probe)
        content = f"{attribute.checksum} {attribute.config.vocab_size} {self.horizon} {self.exact}"
        key = hashlib.sha256(content.encode()).hexdigest()
        with self._lock:
            kept = self._kept.get(key)
            if not isinstance(kept, Lookahead):
                kept = Lookahead(self.hmm, attribute, self.horizon)
                kept = kept if self.exact else kept.with_missing()
            return Factor(key, self._keep(key, kept), transform)

    def _window(self, goals: Iterable[Goal]) -> Window:
        """Return the window of all goals, with the automata of its markers.

        Raise if the windows differ: the goals of one sequence are factors of the same token.
        """
        windows = {(goal.after, goal.window) for goal in goals}
        if len(windows) > 1:
            raise InvalidInputError(
                "The goals of one text begin or end at different tokens. They are steered toward "
                "as one product: give all of them the same `after` and the same `window`."
            )
        after, until = windows.pop()
        return Window(
            None if after is None else self._marker(after),
            self._marker(until) if isinstance(until, Marker) else until,
        )

    def _marker(self, marker: Marker) -> CompiledMarker:
        require_same_fingerprint(
            f"The marker {marker.text!r}",
            marker.tokenizer_fingerprint,
            self.hmm.config.tokenizer_fingerprint,
        )
        with self._lock:
            kept = self._kept.get(marker.key)
            if not isinstance(kept, CompiledMarker):
                kept = CompiledMarker.of(marker)
            return self._keep(marker.key, kept)

    def _keep(self, key: str, item: T) -> T:
        """Keep tables or an automaton; drop the least recently used ones over the budget."""
        self._kept[key] = item
        self._kept.move_to_end(key)
        while self.nbytes > self.memory:
            self._kept.popitem(last=False)
        return item
