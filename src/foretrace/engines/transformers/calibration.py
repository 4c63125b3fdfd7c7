"""Calibration: find the strengths of an attribute's levels by short steered runs of an LM."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.context import Probe
from foretrace.engines.prompts import Goals, common_hmm
from foretrace.engines.transformers.batch import LMBatch, cut_at_end
from foretrace.engines.transformers.nucleus import draw_nucleus, token_nats
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.levels import BUDGETS, START, find_strength
from foretrace.lookahead.strengths import HMMPrices
from foretrace.steering import CompiledGoal, Compiler, Goal, Request, Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 0.05  # of the price, relative: on other prompts it differs by more
NUM_ROWS = 32  # sequences of a run
OPENING_TOKENS, OPENING_TOP_P = 8, 0.9  # of the default prompts
OnStage = Callable[[str, int, int, str], None]
"""Called with the name of a stage, what is done of it, its size, and the unit of both."""


def silent(stage: str, done: int, total: int, unit: str) -> None:
    """Show no progress."""


class CalibratedLevel(NamedTuple):
    """A level: its budget, the strength that was found, and the price of that strength.

    Attributes:
        budget: The price to reach, in nats per token.
        strength: The strength.
        price: The price that was measured, in nats per token.
    """

    budget: float
    strength: float
    price: float


class Continuation(NamedTuple):
    """A continuation of a prompt.

    Attributes:
        tokens: The token ids, with the end-of-text token.
        price: The price of steering, in nats, summed over the tokens.
        nats: The negative log-probability of the tokens under the bare LM.
    """

    tokens: list[int]
    price: float
    nats: float


def calibrate(
    runs: "SteeredRuns",
    hmm: HMM,
    attribute: Attribute,
    budgets: Mapping[str, float] = BUDGETS,
    *,
    probe: Probe | None = None,
) -> dict[str, CalibratedLevel]:
    """Find the strength of every level of an attribute.

    Args:
        runs: The runs of the language model that measure prices, three to ten times.
        hmm: The HMM of the language model.
        attribute: A product, evidence, or a conjunction of them.
        budgets: The price of each level in nats per token.
        probe: The probe of the language model, if the attribute has a context reward.

    Returns:
        The levels. A level whose budget no strength reaches has the largest strength, or the
        smallest.

    Raises:
        InvalidInputError: If the attribute has no strength, or a budget is not above 0.
    """
    if not (attribute.has_power and attribute.has_weights):
        raise InvalidInputError(
            f"'{attribute.name}' has no strength to calibrate: it is no product of token weights "
            f"and no evidence."
        )
    if wrong := [budget for budget in budgets.values() if not budget > 0]:
        raise InvalidInputError(f"A budget must be above 0 nats per token, not {wrong[0]:g}.")

    compiler = Compiler(hmm, runs.max_new_tokens, probe, memory=0)

    def price(strength: float) -> float:
        return runs.price(compiler.compile(Goal(attribute, strength)))

    known: dict[float, float] = {}
    middle = median_low(budgets.values())
    start = HMMPrices(hmm).strength(attribute, middle) if attribute.has_words else START
    levels = {}
    for name, budget in sorted(budgets.items(), key=lambda item: abs(item[1] - middle)):
        strength = find_strength(price, budget, known, start=start, tolerance=TOLERANCE)
        levels[name] = CalibratedLevel(budget, strength, known[strength])
    return {name: levels[name] for name in budgets}


class SteeredRuns:
    """Continuations of the same prompts, sampled at temperature 1 from the same random numbers.

    Since only the goal differs from run to run, so do prices: differences between strengths are
    much less noisy than the prices themselves.

    Args:
        model: A causal LM of transformers.
        prompts: Token ids of each prompt.
        ends: Tokens that end a text.
        copies: Continuations of each prompt. By default, NUM_ROWS sequences in all.
        max_new_tokens: Tokens to generate at most.
        top_p: The probability of the nucleus to sample from.
        seed: The random seed.
        on_progress: Called at every step of a run, with the name of the goal.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        prompts: Sequence[Sequence[int]],
        *,
        ends: Sequence[int],
        copies: int | None = None,
        max_new_tokens: int = 24,
        top_p: float = 1.0,
        seed: int = 0,
        on_progress: OnStage = silent,
    ) -> None:
        copies = copies or -(-NUM_ROWS // len(prompts))
        self.prompts = [tuple(prompt) for prompt in prompts for _ in range(copies)]
        self._num_prompts = len(prompts)
        self.ends, self.max_new_tokens = tuple(ends), max_new_tokens
        self.top_p, self.seed = top_p, seed
        self.on_progress = on_progress
        self._rows = LMBatch(model, prompts, copies)  # the prompts are read once

    def price(self, goal: Goals) -> float:
        """Return the mean price of a generated token, in nats.

        Args:
            goal: The goal of all prompts, or a goal for each prompt.

        Returns:
            Nats per token.
        """
        drawn = self.draw(goal)
        return sum(row.price for row in drawn) / sum(len(row.tokens) for row in drawn)

    @torch.inference_mode()
    def draw(self, goal: Goals, stage: str = "") -> list[Continuation]:
        """Continue the prompts.

        Args:
            goal: The goal of all prompts, or a goal for each prompt; None for bare texts.
            stage: The name of the run, for `on_progress`. By default, the name of the goal.

        Returns:
            The continuations of each prompt, one after the other.
        """
        stage = stage or (goal.name if isinstance(goal, CompiledGoal) else "steered")
        rows, steering = deepcopy(self._rows), self._start(goal)
        slots, device = list(range(len(self.prompts))), rows.logits.device
        generator = torch.Generator(device).manual_seed(self.seed)
        ends = torch.tensor(self.ends, dtype=torch.long, device=device)
        has_ended = torch.zeros(len(slots), dtype=torch.bool, device=device)
        sums, drawn = torch.zeros(2, len(slots), device=device), []  # price, -log p
        for num_generated in range(1, self.max_new_tokens + 1):
            logits = rows.logits
            if steering is not None:
                logits = logits.clone()
                prices = steering.reweight_(logits, slots, measure=True)
                assert prices is not None
                sums[0] += prices.nats.to(device).masked_fill(has_ended, 0.0)
            tokens = draw_nucleus(logits, self.top_p, generator).tokens
            sums[1] += token_nats(rows.logits, tokens).masked_fill(has_ended, 0.0)
            has_ended |= torch.isin(tokens, ends)
            drawn.append(tokens)
            self.on_progress(stage, num_generated, self.max_new_tokens, "tokens")
            if num_generated == self.max_new_tokens or bool(has_ended.all()):
                break
            if steering is not None:
                steering.advance(slots, tokens.to(steering.hmm.device))
            rows.append(tokens)
        texts = [cut_at_end(row, self.ends) for row in torch.stack(drawn, 1).tolist()]
        return list(map(Continuation, texts, *sums.tolist()))

    def _start(self, goal: Goals) -> Steering | None:
        """Start all sequences; None for bare texts."""
        hmm = common_hmm(goal)
        if hmm is None:
            return None
        each = [goal] * self._num_prompts if isinstance(goal, CompiledGoal) else goal or []
        copies = len(self.prompts) // self._num_prompts
        steering = Steering(hmm)
        steering.start(
            {
                row: Request(each[row // copies], prompt, self.max_new_tokens, None, self.ends)
                for row, prompt in enumerate(self.prompts)
            }
        )
        return steering


def write_openings(
    model: "PreTrainedModel",
    start: Sequence[int],
    *,
    ends: Sequence[int],
    count: int = NUM_ROWS,
    seed: int = 0,
) -> list[list[int]]:
    """Sample the first tokens of texts from an LM at top-p 0.9, as prompts.

    Args:
        model: A causal LM of transformers.
        start: The tokens that begin a text.
        ends: Tokens that end a text. They do not occur after the start.
        count: The number of prompts.
        seed: The random seed.

    Returns:
        Token ids of each prompt.
    """
    steps = openings(model, start, ends=ends, count=count, top_p=OPENING_TOP_P, seed=seed)
    drawn = torch.stack([tokens for _, tokens in steps], 1)
    return [[*start, *tokens] for tokens in drawn.tolist()]


@torch.inference_mode()
def openings(
    model: "PreTrainedModel",
    start: Sequence[int],
    *,
    ends: Sequence[int],
    count: int = NUM_ROWS,
    length: int = OPENING_TOKENS,
    top_p: float,
    seed: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Sample the first tokens of texts from an LM.

    Args:
        model: A causal LM of transformers.
        start: The tokens that begin a text.
        ends: Tokens that end a text. They do not occur after the start.
        count: The number of texts.
        length: The number of tokens after the start.
        top_p: The probability of the nucleus to sample from.
        seed: The random seed.

    Yields:
        For each token, the logits of the texts, (n, V), and the tokens drawn, (n,).
    """
    rows = LMBatch(model, [start], count)
    generator = torch.Generator(rows.logits.device).manual_seed(seed)
    for remaining in reversed(range(length)):
        rows.logits[:, list(ends)] = -torch.inf
        tokens = draw_nucleus(rows.logits, top_p, generator).tokens
        yield rows.logits, tokens
        if remaining:
            rows.append(tokens)
