"""The strengths of attributes at a level: together, they cost its budget.

`foretrace calibrate` measures the strengths of single attributes with the language model. For what
is made of calibrated attributes, the HMM says how its price compares with theirs.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from statistics import fmean
from threading import RLock

import torch

from foretrace.attribute import Attribute
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.levels import BUDGETS, MAX_REWARD_PRICE, find_strength
from foretrace.lookahead.lookahead import log_weights_of

logger = logging.getLogger(__name__)

MAX_KNOWN = 4_096  # strengths that are remembered
NUM_TEXTS, NUM_TOKENS, DISTANCE = 32, 24, 4  # the HMM's texts, and tokens between two contexts


class LevelStrengths:
    """Finds the strengths of levels for one HMM, and remembers what took time to find.

    Args:
        hmm: The HMM of the language model.
    """

    def __init__(self, hmm: HMM) -> None:
        self.hmm = hmm
        self._known: OrderedDict[tuple[str, ...], float] = OrderedDict()
        self._lock = RLock()

    def raised(self, attributes: Sequence[Attribute], level: str) -> list[Attribute]:
        """Return attributes to the power of their strengths at a level.

        Each attribute has the same share of the strength that it would have alone. The share is
        such that by the HMM, the product costs the mean of what the attributes cost alone. It is
        at most 1, also for attributes that contradict each other. The HMM does not know what a
        context reward costs: if an attribute has nothing else, all of them count as independent.
        Constraints and attributes without powers have strength 1.

        Raises:
            InvalidInputError: If there is no such level.
        """
        _require_level(level, *(name for one in attributes for name in one.config.levels))
        strengths = [self._strength(one, level) for one in attributes]
        powers = [one**strength for one, strength in zip(attributes, strengths, strict=True)]
        graded = [one for one in powers if _has_strength(one)]
        if len(graded) < 2:
            return powers
        key = sorted(one.checksum for one in graded)
        if all(one.has_words for one in graded):
            share = self._remembered(
                key, lambda: min(1.0, self._matched(reduce(and_, graded), graded))
            )
        else:  # the price is about proportional to the square of the strength
            share = len(graded) ** -0.5
        return [
            one ** (share * strength) if _has_strength(one) else one
            for one, strength in zip(attributes, strengths, strict=True)
        ]

    def _strength(self, attribute: Attribute, level: str) -> float:
        """Return the strength of an attribute that is the only one at a level."""
        levels = attribute.config.levels
        if not _has_strength(attribute):
            if attribute.has_weights:
                self._remembered([attribute.checksum], lambda: _say_that_it_is_fixed(attribute))
            return 1.0
        if level in levels:
            return levels[level]
        opposite = ~attribute if attribute.is_evidence else attribute
        if level in opposite.config.levels:
            if not attribute.has_words:
                return opposite.config.levels[level]
            other = opposite ** opposite.config.levels[level]
            return self._remembered(
                ["~", other.checksum], lambda: self._negated(attribute, other, level)
            )
        return self._remembered(
            [level, attribute.checksum], lambda: self._uncalibrated(attribute, level)
        )

    def _matched(self, attribute: Attribute, others: Sequence[Attribute]) -> float:
        """Return the strength at which an attribute costs the mean of others, by the HMM."""
        prices = HMMPrices(self.hmm)
        return prices.strength(attribute, fmean(prices.price(one) for one in others))

    def _negated(self, attribute: Attribute, opposite: Attribute, level: str) -> float:
        strength = self._matched(attribute, [opposite])
        logger.warning(
            "The price of '%s' at '%s' was not measured, and may miss its budget by half: the HMM "
            "alone compared it with that of its negation. `foretrace calibrate` measures both.",
            attribute.name,
            level,
            extra={"attribute": attribute.name},
        )
        return strength

    def _uncalibrated(self, attribute: Attribute, level: str) -> float:
        _require_level(level)
        if not attribute.has_words:
            raise InvalidInputError(
                f"'{attribute.name}' rewards tokens by their context alone, and was not "
                f"calibrated: the HMM does not know its price. Run `foretrace calibrate`, or give "
                f"a strength."
            )
        strength = HMMPrices(self.hmm).strength(attribute, BUDGETS[level])
        logger.warning(
            "'%s' was not calibrated: strength %.2g for the level '%s' was found with %s "
            "alone. `foretrace calibrate` measures it with the language model.",
            attribute.name,
            strength,
            level,
            "token frequencies" if self.hmm.is_unigram else "the HMM",
            extra={"attribute": attribute.name},
        )
        return strength

    def _remembered(self, key: Sequence[str], find: Callable[[], float]) -> float:
        with self._lock:
            strength = self._known.pop(tuple(key), None)
            self._known[tuple(key)] = strength = find() if strength is None else strength
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return strength


def _require_level(level: str, *others: str) -> None:
    names = dict.fromkeys([*BUDGETS, *others])
    if level not in names:
        raise InvalidInputError(f"There is no level '{level}'. Choose one of {', '.join(names)}.")


def _has_strength(attribute: Attribute) -> bool:
    return attribute.has_power and attribute.has_weights


def _say_that_it_is_fixed(attribute: Attribute) -> float:
    logger.warning(
        "'%s' costs the same at every level: a sum of products has no strength but 1.",
        attribute.name,
        extra={"attribute": attribute.name},
    )
    return 1.0


class HMMPrices:
    """Prices of steering at next-token distributions of the HMM, without lookahead.

    The HMM generates texts. Its distributions after every fourth token take the place of the
    language model's.

    Args:
        hmm: The HMM.
    """

    @torch.inference_mode()
    def __init__(self, hmm: HMM) -> None:
        self.hmm = hmm
        texts = hmm.sample(NUM_TEXTS, NUM_TOKENS, seed=0)
        ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long, device=hmm.device)
        has_ended = torch.isin(texts, ends).cumsum(1) > 0
        contexts = [hmm.initial[None]]
        for position, after in enumerate(inference.scan(hmm, texts)):
            if position % DISTANCE == DISTANCE - 1:
                contexts.append(after.predicted[~has_ended[:, position]])
        self.probability = hmm.emission.predict(torch.cat(contexts))  # (n, V)

    @torch.inference_mode()
    def price(self, attribute: Attribute, strength: float = 1.0) -> float:
        """Return the mean price of steering toward an attribute.

        The price of a constraint does not depend on the strength, so that constraints are left out.

        Args:
            attribute: A product, evidence, or a conjunction of them.
            strength: The strength.

        Returns:
            Nats per token.
        """
        log_weights = strength * log_weights_of(self.hmm, attribute)
        log_weights -= log_weights.max()
        weights = log_weights.exp()
        columns = torch.stack([weights, weights * log_weights], 1).to(self.probability)
        total, moment = (self.probability @ columns).double().T
        total = total.clamp_min(inference.IMPOSSIBLE)
        nats = (moment / total - total.log()).clamp_min_(0.0)
        if any(one.first_only for one in attribute.evidence):
            nats.clamp_max_(MAX_REWARD_PRICE)
        return float(nats.mean())

    def strength(self, attribute: Attribute, budget: float) -> float:
        """Find the strength whose mean price is a budget.

        Args:
            attribute: A product, evidence, or a conjunction of them.
            budget: Nats per token.

        Returns:
            The strength.
        """
        return find_strength(lambda strength: self.price(attribute, strength), budget, {})
