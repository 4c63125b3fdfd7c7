"""The report of an attribute: what its levels change in the texts of an LM, and a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import Any, NamedTuple, Self

from foretrace.errors import InvalidInputError

MIN_GAIN = 0.25  # of the probability: an attribute works if it gains this much,
MIN_AFTER = 0.5  # to at least this probability,
MIN_SHARE = 0.5  # or if it gains this share of what bare texts lack
STANDARD_ERRORS = 2  # a gain within so many is chance
MOST_BARE = 0.9  # bare texts with this probability have the attribute already
RARE_BARE = 0.2  # bare texts below this probability rarely have the attribute
MIN_PERPLEXITY, MAX_PERPLEXITY = 0.9, 1.25  # of steered texts, relative to bare ones
MAX_MISSED = 0.5  # of the price from its budget, relative
WORKS, WEAK, FAILS = "works", "weak", "does not work"


class TextPair(NamedTuple):
    """Two continuations of a prompt, from the same random numbers.

    Attributes:
        prompt: The prompt.
        bare: The continuation without steering.
        steered: The continuation with steering.
    """

    prompt: str
    bare: str
    steered: str


@dataclass(frozen=True)
class LevelReport:
    """What a level of an attribute changes in the texts of a language model.

    Attributes:
        level: The name of the level.
        strength: Its strength.
        price: The measured price in nats per token.
        before: The mean probability of the attribute without steering.
        after: The mean probability with steering.
        standard_error: The standard error of `after - before`, over prompts.
        perplexity_ratio: The perplexity of steered texts under the LM itself, divided by the
            perplexity of bare texts.
        perplexity_error: The standard error of its logarithm, over prompts.
        budget: The price that the level was calibrated for; None if unknown.
        pairs: Bare and steered texts of the first prompts.
    """

    level: str
    strength: float
    price: float
    before: float
    after: float
    standard_error: float
    perplexity_ratio: float
    perplexity_error: float = 0.0
    budget: float | None = None
    pairs: tuple[TextPair, ...] = ()

    @property
    def gain(self) -> float:
        """The difference of the probability: `after - before`."""
        return self.after - self.before

    @property
    def outcome(self) -> str:
        """`works`, `weak`, or `does not work`: the gain may be chance."""
        if not self.gain > STANDARD_ERRORS * self.standard_error:
            return FAILS
        share = self.gain >= MIN_SHARE * (1 - self.before)
        enough = share or (self.gain >= MIN_GAIN and self.after >= MIN_AFTER)
        return WORKS if enough else WEAK

    @property
    def is_fluent(self) -> bool:
        """Whether the perplexity is about the same as before, or the difference may be chance."""
        difference = abs(log(self.perplexity_ratio))
        is_chance = difference <= STANDARD_ERRORS * self.perplexity_error
        return is_chance or MIN_PERPLEXITY <= self.perplexity_ratio <= MAX_PERPLEXITY


@dataclass(frozen=True)
class AttributeReport:
    """What steering toward an attribute does, as measured with a language model.

    `Attribute.report` returns it, once `foretrace calibrate` has measured it.

    Attributes:
        levels: The levels, from the weakest to the strongest; at least one.
        independent: Whether an independent classifier of whole texts judged. Otherwise, the
            probabilities are the attribute's own, which steering increases directly.
        judge_auc: The cross-validated AUC of the independent classifier; None if there was none.
        num_texts: The number of texts that the independent classifier was fitted to.
        num_prompts: The number of prompts that were continued.
        warnings: What the fit warns of.

    Example:
        >>> from foretrace.attribute.report import AttributeReport, LevelReport
        >>> strong = LevelReport("strong", 3.0, 0.15, 0.52, 0.71, 0.03, 1.05)
        >>> report = AttributeReport((strong,), True, 0.9, num_texts=1000, num_prompts=32)
        >>> print(report.verdict)
        `strong` moves 0.52 to 0.71: weak. The gain of 0.19 is below 0.25, and below half of what
        bare texts lack. More texts, or texts closer to your prompts, help most.
    """

    levels: tuple[LevelReport, ...]
    independent: bool
    judge_auc: float | None
    num_texts: int
    num_prompts: int
    warnings: tuple[str, ...] = ()

    @property
    def judge(self) -> str:
        """How the probabilities were measured."""
        if self.independent:
            return (
                f"an independent classifier of whole texts (AUC {self.judge_auc:.2f} on "
                f"{self.num_texts:,} texts)"
            )
        if self.judge_auc is None:
            return "its own classifier, which may overstate"
        return (
            f"its own classifier, which may overstate: an independent one has an AUC of only "
            f"{self.judge_auc:.2f} on these {self.num_texts:,} texts, so that nobody can judge the "
            f"attribute from them"
        )

    @property
    def outcome(self) -> str:
        """`works`, `weak` or `does not work`: the outcome of the strongest level."""
        return self.levels[-1].outcome

    @property
    def verdict(self) -> str:
        """What the strongest level does, which number decides, and what to do about it."""
        level = self.levels[-1]
        subject = f"`{level.level}` moves {level.before:.2f} to {level.after:.2f}: {level.outcome}."
        if not self.independent:
            subject = f"By its own classifier, which may overstate, {subject}"
        return " ".join([subject, *_reasons(level), *self._costs(level)])

    def _costs(self, level: LevelReport) -> list[str]:
        """Return what is wrong with the perplexity and the price of a level."""
        costs = []
        fluent = [one.level for one in self.levels if one.is_fluent and one.outcome != FAILS]
        instead = f" Use `{fluent[-1]}`." if fluent and not level.is_fluent else ""
        if not level.is_fluent and level.perplexity_ratio > 1:
            costs.append(
                f"Perplexity rises by {level.perplexity_ratio - 1:.0%}, more than "
                f"{MAX_PERPLEXITY - 1:.0%}: the texts are less fluent.{instead}"
            )
        elif not level.is_fluent:
            costs.append(
                f"Perplexity falls to {level.perplexity_ratio:.0%} of bare texts, below "
                f"{MIN_PERPLEXITY:.0%}: the texts may repeat themselves.{instead}"
            )
        if level.budget is not None and abs(level.price / level.budget - 1) > MAX_MISSED:
            costs.append(
                f"The price is {level.price:.3f} nats per token instead of {level.budget:g}."
            )
        return costs

    def to_record(self) -> dict[str, Any]:
        """Return the report as JSON values, without the warnings of the fit.

        Returns:
            The fields of the report, and the verdict for those who read the file.
        """
        record = asdict(self) | {"verdict": self.verdict}
        del record["warnings"]
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any], warnings: Sequence[str] = ()) -> Self:
        """Make a report from the result of `to_record`.

        Args:
            record: The fields of the report.
            warnings: What the fit warns of.

        Returns:
            The report.

        Raises:
            InvalidInputError: If fields are missing or unknown.
        """
        try:
            fields = {key: value for key, value in record.items() if key != "verdict"}
            levels = tuple(
                LevelReport(**{**level, "pairs": tuple(TextPair(*pair) for pair in level["pairs"])})
                for level in fields.pop("levels")
            )
            if not levels:
                raise ValueError("no levels")
            return cls(levels, **fields, warnings=tuple(warnings))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(
                "The report of the attribute cannot be read. Run `foretrace calibrate` again."
            ) from error


def _reasons(level: LevelReport) -> list[str]:
    """Return which number decides the outcome of a level, and what to do about it."""
    gain = f"The gain of {level.gain:.2f}"
    if level.outcome == WORKS:
        enough = f"{MIN_GAIN:g}" if level.gain >= MIN_GAIN else "half of what bare texts lack"
        return [f"{gain} is at least {enough}."]
    if level.before >= MOST_BARE:
        return [f"Bare texts have the attribute already: {level.before:.2f}."]
    if level.outcome == WEAK:
        too_low = f"{gain} is below {MIN_GAIN:g}, and below half of what bare texts lack."
        if level.gain >= MIN_GAIN:
            too_low = f"{level.after:.2f} is below {MIN_AFTER:g}: most texts still lack it."
        if level.before < RARE_BARE:
            return [too_low, "Bare texts rarely have it: a higher price or longer texts help most."]
        return [too_low, "More texts, or texts closer to your prompts, help most."]
    error = STANDARD_ERRORS * level.standard_error
    return [
        f"{gain} is not above {error:.2f}, two standard errors.",
        "Compare the texts that it was fitted to with your prompts.",
    ]
