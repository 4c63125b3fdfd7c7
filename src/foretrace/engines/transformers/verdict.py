"""What an attribute does to the texts of a language model: levels, a report, a verdict."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from foretrace.attribute import Attribute
from foretrace.attribute.report import AttributeReport, LevelReport, TextPair
from foretrace.chat import Prompt
from foretrace.context import Probe
from foretrace.engines.transformers.calibration import (
    NUM_ROWS,
    CalibratedLevel,
    OnStage,
    SteeredRuns,
    calibrate,
    silent,
)
from foretrace.engines.transformers.judged_runs import (
    TOP_P,
    Floats,
    JudgedTexts,
    RunPrompts,
    TextReader,
)
from foretrace.engines.transformers.text_classifier import TextClassifier
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.levels import BUDGETS
from foretrace.steering import Compiler, Goal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REPORT_ROWS = 2 * NUM_ROWS  # sequences of a run for the report
NUM_PAIRS = 3  # of texts to read
MOST_DEVIATION = 0.25  # of a measured price from its budget


def calibrate_and_report(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    hmm: HMM,
    attribute: Attribute,
    *,
    prompts: Sequence[Prompt] = (),
    judge: TextClassifier | None = None,
    budgets: Mapping[str, float] = BUDGETS,
    probe: Probe | None = None,
    max_new_tokens: int = 24,
    seed: int = 0,
    source: Mapping[str, Any] | None = None,
    on_progress: OnStage = silent,
) -> Attribute:
    """Find the strengths of an attribute's levels, and measure what they change.

    Args:
        lm: A causal LM of transformers.
        tokenizer: Its tokenizer.
        hmm: Its HMM, on the device of the LM.
        attribute: A product, evidence, or a conjunction of them.
        prompts: Texts and chats to continue, of which the first NUM_ROWS are used. By default,
            openings that the LM writes.
        judge: An independent classifier of the steered texts. `judged_runs.fit_judge` fits one to
            the texts of the attribute.
        budgets: The price of each level in nats per token.
        probe: The probe of the LM, if the attribute has a context reward.
        max_new_tokens: Tokens to generate at most.
        seed: The random seed.
        source: What was used, for the record: the names of the LM, the HMM and the prompts.
        on_progress: Called with stage, done, total and unit.

    Returns:
        The attribute with its levels, those of its negation, and with `report`.

    Raises:
        InvalidInputError: If the attribute has no strength, or a budget is not above 0.

    Example:
        >>> from foretrace.engines.transformers.verdict import calibrate_and_report
        >>> measured = calibrate_and_report(model, tokenizer, hmm, attribute, max_new_tokens=4)
        >>> list(measured.config.levels)
        ['mild', 'medium', 'strong']
        >>> measured.report.independent
        False
    """
    encoded = RunPrompts.encode(lm, tokenizer, hmm, prompts, seed)
    runs = SteeredRuns(
        lm,
        encoded.ids,
        ends=encoded.ends,
        max_new_tokens=max_new_tokens,
        seed=seed,
        on_progress=on_progress,
    )
    levels = calibrate(runs, hmm, attribute, budgets, probe=probe)
    negated = (
        calibrate(runs, hmm, ~attribute, budgets, probe=probe) if attribute.is_evidence else {}
    )
    for name, level in negated.items():
        if abs(level.price / level.budget - 1) > MOST_DEVIATION:
            logger.warning(
                "'~%s' at '%s' costs %.3f nats per token instead of %g, as close as it can be.",
                attribute.name,
                name,
                level.price,
                level.budget,
                extra={"attribute": attribute.name},
            )
    record = {
        **(source or {}),
        "rows": len(runs.prompts),
        "max_new_tokens": max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": seed,
        "levels": {name: level._asdict() for name, level in levels.items()},
        "negation_levels": {name: level._asdict() for name, level in negated.items()},
    }
    attribute = with_record(attribute, calibration=record)
    attribute = with_levels(attribute, levels, negated)
    report = measure_report(
        lm,
        tokenizer,
        hmm,
        attribute,
        prompts,
        judge=judge,
        probe=probe,
        max_new_tokens=max_new_tokens,
        seed=seed,
        on_progress=on_progress,
    )
    return with_record(attribute, report=report.to_record())


def measure_report(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    hmm: HMM,
    attribute: Attribute,
    prompts: Sequence[Prompt] = (),
    *,
    judge: TextClassifier | None = None,
    probe: Probe | None = None,
    max_new_tokens: int = 24,
    seed: int = 0,
    on_progress: OnStage = silent,
) -> AttributeReport:
    """Measure what the levels of an attribute change in the texts of a language model.

    The same prompts are continued without steering and at every level, from the same random
    numbers, at temperature 1 and top-p 0.9.

    Args:
        lm: A causal LM of transformers.
        tokenizer: Its tokenizer.
        hmm: Its HMM, on the device of the LM.
        attribute: An attribute with levels.
        prompts: Texts and chats to continue, of which the first NUM_ROWS are used. By default,
            openings that the LM writes.
        judge: A classifier of texts that have the attribute. Without one, or if it is not trusted,
            the attribute's own probability is measured.
        probe: The probe of the LM, if the attribute has a context reward.
        max_new_tokens: Tokens to generate at most.
        seed: The random seed.
        on_progress: Called with stage, done, total and unit.

    Returns:
        The report.

    Raises:
        InvalidInputError: If the attribute has no levels.

    Example:
        >>> from dataclasses import dataclass, replace
        >>> from foretrace.engines.transformers.verdict import measure_report
        >>> config = replace(attribute.config, levels={"strong": 4.0})
        >>> calibrated = replace(attribute, config=config)
        >>> report = measure_report(model, tokenizer, hmm, calibrated, max_new_tokens=4)
        >>> [level.level for level in report.levels]
        ['strong']
    """
    if not attribute.config.levels:
        raise InvalidInputError(
            f"'{attribute.name}' has no levels to report on. Run `foretrace calibrate` first."
        )
    encoded = RunPrompts.encode(lm, tokenizer, hmm, prompts, seed)
    runs = SteeredRuns(
        lm,
        encoded.ids,
        ends=encoded.ends,
        copies=-(-REPORT_ROWS // len(encoded.ids)),
        max_new_tokens=max_new_tokens,
        top_p=TOP_P,
        seed=seed + 1,  # not the numbers by which the price was calibrated
        on_progress=on_progress,
    )
    trusted = judge is not None and judge.is_trusted
    reader = TextReader(tokenizer, attribute, judge if trusted else None, runs)
    budgets = attribute.config.fit.get("calibration", {}).get("levels", {})
    compiler = Compiler(hmm, max_new_tokens, probe, memory=0)
    bare, levels = reader.read(runs.draw(None, "bare")), []
    for name, strength in sorted(attribute.config.levels.items(), key=lambda item: item[1]):
        steered = reader.read(runs.draw(compiler.compile(Goal(attribute, strength)), name))
        level = _compare(bare, steered, len(encoded.ids))
        pairs = [
            TextPair(reader.prompt_text(row), bare.texts[row], steered.texts[row])
            for row in range(0, len(bare.texts), len(bare.texts) // len(encoded.ids))
        ]
        budget = budgets.get(name, {}).get("budget")
        levels.append(
            LevelReport(name, strength, **level, budget=budget, pairs=tuple(pairs[:NUM_PAIRS]))
        )
    return AttributeReport(
        tuple(levels),
        trusted,
        None if judge is None else judge.auc,
        0 if judge is None else judge.num_texts,
        len(encoded.ids),
        tuple(attribute.config.fit.get("warnings", ())),
    )


def _compare(bare: JudgedTexts, steered: JudgedTexts, num_prompts: int) -> dict[str, float]:
    """Return the figures of a level. Rows of one prompt are next to each other."""
    return {
        "price": steered.price,
        "before": float(bare.probabilities.mean()),
        "after": float(steered.probabilities.mean()),
        "standard_error": _error(steered.probabilities - bare.probabilities, num_prompts),
        "perplexity_ratio": exp(steered.nats - bare.nats),
        "perplexity_error": _error(steered.text_nats - bare.text_nats, num_prompts),
    }


def _error(differences: Floats, num_prompts: int) -> float:
    """Return the standard error of the mean over prompts; of one prompt, over its texts."""
    rows = differences.reshape(num_prompts, -1)
    each = rows.mean(1) if num_prompts > 1 else rows[0]
    return float(each.std(ddof=1)) / sqrt(len(each))


def with_levels(
    attribute: Attribute,
    levels: Mapping[str, CalibratedLevel],
    negated: Mapping[str, CalibratedLevel],
) -> Attribute:
    """Return a copy with the strengths of levels and of the negation's levels."""
    config = replace(
        attribute.config,
        levels={name: level.strength for name, level in levels.items()},
        negation_levels={name: level.strength for name, level in negated.items()},
    )
    return replace(attribute, config=config)


def with_record(attribute: Attribute, **facts: Any) -> Attribute:
    """Return a copy with facts added to the record of its fit."""
    config = replace(attribute.config, fit={**attribute.config.fit, **facts})
    return replace(attribute, config=config)
