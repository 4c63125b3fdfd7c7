"""Compile goals for an HMM: merge them, find the strengths of levels, build tables and automata."""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from threading import RLock
from typing import TypeVar

import torch

from foretrace.attribute import Attribute, LogitAffine
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.levels import BUDGETS, find_strength
from foretrace.lookahead.lookahead import Lookahead
from foretrace.steering.goal import IDENTITY, CompiledGoal, Factor, Goal
from foretrace.steering.markers import CompiledMarker, Marker, Window
from foretrace.steering.price import prices
from foretrace.vocabulary import require_same_fingerprint

logger = logging.getLogger(__name__)

DEFAULT_MEMORY = 1 << 30
MAX_STRENGTHS = 4_096  # strengths of levels that are remembered

T = TypeVar("T", Lookahead, CompiledMarker)


class Compiler:
    """Makes compiled goals for one HMM. It keeps tables for goals that are compiled again.

    Args:
        hmm: The HMM of the language model.
        horizon: How many tokens to look ahead after the next one. 0 weighs the next token alone.
        memory: How many bytes of tables to keep. The least recently used are dropped first.

    Example:
        >>> compiler = ft.Compiler(hmm, horizon=8)
        >>> compiled = compiler.compile([ft.Goal(attribute, 2.0), ft.Goal(attribute, 3.0)])
        >>> compiled.factors[0].lookahead.attribute.name
        '(nontoxic ** 2 & nontoxic ** 3)'
    """

    def __init__(self, hmm: HMM, horizon: int = 64, *, memory: int = DEFAULT_MEMORY) -> None:
        self.hmm, self.horizon, self.memory = hmm, horizon, memory
        self._kept: OrderedDict[str, Lookahead | CompiledMarker] = OrderedDict()
        self._strengths: OrderedDict[tuple[str, float], float] = OrderedDict()
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
                cannot be steered toward, or an attribute or marker does not fit the HMM.
        """
        goals = [goals] if isinstance(goals, Goal) else list(goals)
        if not goals:
            raise InvalidInputError("There is no goal. Name at least one attribute.")
        window = self._window(goals)
        factors = tuple(
            self._factor(attribute, transform) for attribute, transform in self.merge(goals)
        )
        return CompiledGoal(self.hmm, factors, window, any(goal.neutral_end for goal in goals))

    def merge(self, goals: Sequence[Goal]) -> list[tuple[Attribute, LogitAffine]]:
        """Return the attributes that goals become, to the power of their strengths.

        The product of all goals without a transform comes first, then each goal with a transform.
        """
        plain = [goal for goal in goals if goal.transform.is_identity]
        merged = []
        if plain:
            powers = [goal.attribute ** self.strength(goal) for goal in plain]
            merged.append((reduce(and_, powers), IDENTITY))
        others = [goal for goal in goals if not goal.transform.is_identity]
        return merged + [
            (goal.attribute ** (goal.strength or 1.0), goal.transform) for goal in others
        ]

    def strength(self, goal: Goal) -> float:
        """Return the strength of a goal: its own, or the strength of its level.

        If an attribute was not calibrated, find the strength with the HMM alone, and log a warning.
        This takes seconds. Attributes without powers and constraints have strength 1.

        Raises:
            InvalidInputError: If there is no such level.
        """
        if goal.strength is not None:
            return goal.strength
        attribute, level = goal.attribute, goal.level
        levels = attribute.config.levels
        if level not in BUDGETS and level not in levels:
            raise InvalidInputError(
                f"There is no level '{level}'. Choose one of {', '.join({**BUDGETS, **levels})}."
            )
        if not (attribute.has_power and attribute.has_weights):
            return 1.0
        return levels[level] if level in levels else self._uncalibrated(attribute, level)

    def _uncalibrated(self, attribute: Attribute, level: str) -> float:
        key = (attribute.checksum, BUDGETS[level])
        with self._lock:
            strength = self._strengths.pop(key, None)
            if strength is None:
                strength = hmm_strength(self.hmm, attribute, BUDGETS[level])
                logger.warning(
                    "'%s' was not calibrated: strength %.2g for the level '%s' was found with the "
                    "HMM alone. `foretrace calibrate` measures it with the language model.",
                    attribute.name,
                    strength,
                    level,
                    extra={"attribute": attribute.name},
                )
            self._strengths[key] = strength
            while len(self._strengths) > MAX_STRENGTHS:
                self._strengths.popitem(last=False)
        return strength

    def _factor(self, attribute: Attribute, transform: LogitAffine) -> Factor:
        content = f"{attribute.checksum} {attribute.config.vocab_size} {self.horizon}"
        key = hashlib.sha256(content.encode()).hexdigest()
        with self._lock:
            kept = self._kept.get(key)
            if not isinstance(kept, Lookahead):
                kept = Lookahead(self.hmm, attribute, self.horizon)
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


def hmm_strength(hmm: HMM, attribute: Attribute, budget: float) -> float:
    """Find the strength of a budget for texts that the HMM itself generates.

    The price of a constraint does not depend on the strength, so that constraints are left out.

    Args:
        hmm: The HMM, which takes the place of the language model.
        attribute: A product, evidence, or a conjunction of them.
        budget: Nats per token.

    Returns:
        The strength.
    """
    graded = replace(attribute, terms=replace(attribute.terms, automaton=None))
    return find_strength(lambda strength: hmm_price(hmm, graded, strength), budget, {})


PROMPT_TOKENS, TEXT_TOKENS, TEXTS = 8, 16, 16  # of the HMM's texts


@torch.inference_mode()
def hmm_price(hmm: HMM, attribute: Attribute, strength: float) -> float:
    """Return the mean price per token of steering texts that the HMM generates.

    Args:
        hmm: The HMM, which takes the place of the language model.
        attribute: An attribute without a constraint.
        strength: The strength of steering toward it.

    Returns:
        Nats per token.
    """
    lookahead = Lookahead(hmm, attribute**strength, TEXT_TOKENS)
    weights = lookahead.token_weights()
    generator = torch.Generator(hmm.device).manual_seed(0)
    prompts = hmm.sample(TEXTS, PROMPT_TOKENS, seed=0)
    ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long, device=hmm.device)
    has_ended = torch.isin(prompts, ends).any(1)
    *_, last = inference.scan(hmm, prompts)
    predicted, total, count = last.predicted, 0.0, 0
    for remaining in reversed(range(TEXT_TOKENS)):
        weighted = predicted * lookahead.tables.values[remaining, :, 0]
        probability = hmm.emission.predict(predicted).clamp_min_(inference.IMPOSSIBLE)
        joint = hmm.emission.predict(weighted).clamp_min_(inference.IMPOSSIBLE)
        bare, steered = probability.log(), joint.log_().add_(weights)
        # Ends are neutral, as they are by default: they keep their probability.
        steered[:, ends] = -torch.inf
        rest = 1 - probability[:, ends].sum(1, keepdim=True)
        steered = steered.log_softmax(-1).add_(rest.clamp_min(inference.IMPOSSIBLE).log_())
        steered[:, ends] = bare[:, ends]
        total += float(prices(bare, steered)[~has_ended].sum())
        count += int((~has_ended).sum())
        tokens = torch.multinomial(steered.softmax(-1), 1, generator=generator)[:, 0]
        has_ended |= torch.isin(tokens, ends)
        predicted = inference.step(hmm, predicted, tokens).predicted
    return total / max(1, count)
