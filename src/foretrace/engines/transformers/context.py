"""Context rewards: fitted with a language model, and kept only if they improve steered texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from foretrace.attribute import Attribute, ContextReward
from foretrace.attribute.evidence import Evidence
from foretrace.attribute.fitting.context import ContextFit, TokenStates, fit_context
from foretrace.attribute.fitting.examples import Examples
from foretrace.attribute.fitting.split import Split
from foretrace.chat import Prompt
from foretrace.context import Head, Probe
from foretrace.engines.prompts import encode_prompts
from foretrace.engines.transformers.calibration import OnStage, SteeredRuns, silent
from foretrace.engines.transformers.hidden_states import encode_texts
from foretrace.engines.transformers.judged_runs import (
    TOP_P,
    JudgedTexts,
    RunPrompts,
    TextReader,
)
from foretrace.engines.transformers.text_classifier import MIN_AUC, TextClassifier
from foretrace.engines.transformers.token_states import (
    MAX_STATES,
    StoredStates,
    read_states,
    remove_states,
    sample_states,
)
from foretrace.engines.transformers.verdict import with_record
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.levels import BUDGETS, find_strength
from foretrace.lookahead.strengths import HMMPrices
from foretrace.steering import Compiler, Goal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = (0.5, 1.0)  # of the context reward beside evidence
LEVEL = "strong"
NUM_TEXTS, NUM_TOKENS = 64, 20  # of a run
TOLERANCE = 0.1  # of the price, relative
MAX_PERPLEXITY = 1.03  # relative to evidence alone
HELD_OUT = 0.1  # of the texts
PRICE_RATIO = 3.0  # of a context reward to evidence, as long as it is unknown


class Trial(NamedTuple):
    """What an attribute does to texts at the price of a level.

    Attributes:
        weight: The weight of the context reward; 0 for words alone.
        strength: The strength.
        price: The price that was measured, in nats per token.
        probability: The mean probability of the attribute, by the judge.
        perplexity: The perplexity of the texts under the bare LM.
    """

    weight: float
    strength: float
    price: float
    probability: float
    perplexity: float


def add_context(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    hmm: HMM,
    attribute: Attribute,
    *,
    judge: TextClassifier | None,
    texts: Sequence[str],
    scores: Sequence[float],
    folder: Path,
    prompts: Sequence[Prompt] = (),
    keep: Sequence[int] = (),
    build_probe: Callable[[], Probe] | None = None,
    max_states: int = MAX_STATES,
    seed: int = 0,
    on_progress: OnStage = silent,
) -> Attribute:
    """Add a context reward to an attribute, if it helps.

    The reward is fitted to texts: to samples of the LM from the prompts, which the judge scores,
    or without prompts to the texts of the attribute. It helps if the log-loss on held-out texts
    improves, and if steered texts have the attribute more often at the same price, with a
    perplexity of at most MAX_PERPLEXITY times as much.

    Args:
        lm: A causal LM of transformers.
        tokenizer: Its tokenizer.
        hmm: Its HMM, on the device of the LM.
        attribute: The attribute, as it was fitted to words.
        judge: The classifier that `fit_judge` fitted to the texts.
        texts: The texts of the attribute.
        scores: Their scores.
        folder: A folder for hidden states. An interrupted call continues with them. In the end,
            they are removed.
        prompts: Texts and chats to continue. By default, openings that the LM writes.
        keep: Tokens that must not decide. The fit learns nothing from them.
        build_probe: Returns the probe of the LM. By default, it is built of the LM.
        max_states: The largest number of tokens to fit to.
        seed: The random seed.
        on_progress: Called with stage, done, total and unit.

    Returns:
        The attribute, with the context reward if it helps. `config.fit["context"]` has what was
        tried, and a summary in one sentence.

    Example:
        >>> from foretrace.engines.transformers.context import add_context
        >>> product = ft.Attribute.from_weights([0.5] * len(tokenizer))
        >>> same = add_context(
        ...     model, tokenizer, hmm, product, judge=None, texts=[], scores=[], folder=folder
        ... )
        >>> same.config.fit["context"]["summary"]
        'Context was not fitted (only evidence has rewards): the attribute reads words alone.'
    """
    if not attribute.is_evidence:
        return _without(attribute, "was not fitted (only evidence has rewards)")
    if judge is None or not judge.is_trusted:
        why = f"no classifier of whole texts reaches an AUC of {MIN_AUC} on these texts"
        return _without(attribute, f"was not fitted ({why})")
    try:
        probe = build_probe() if build_probe else Probe.build(Head.of_model(lm, tokenizer))
    except InvalidInputError as error:  # some heads cannot be inverted
        return _without(attribute, f"was not fitted ({f'{error}'.rstrip('.')})")
    work = _Work(
        lm,
        tokenizer,
        hmm,
        judge,
        probe,
        RunPrompts.encode(lm, tokenizer, hmm, prompts, seed),
        seed,
        on_progress,
    )
    if prompts:
        data = work.sample(encode_prompts(tokenizer, prompts), folder, max_states)
    else:
        data = work.read(texts, scores, folder, max_states)
    fitted = work.fit(data, attribute.evidence, keep)
    record = {"source": "samples" if prompts else "texts", **fitted.record}
    if fitted.improves:
        chosen = choose_context(
            attribute, fitted.reward, work.trials(attribute, fitted.reward), record
        )
    else:
        change = fitted.record["loss"] - fitted.record["loss_without"]
        margin = 2 * fitted.record["standard_error"]
        why = f"does not help here (held-out log-loss: {change:+.4f} \u00b1 {margin:.4f})"
        chosen = _without(attribute, why, **record)
    remove_states(folder)
    return chosen


def _without(attribute: Attribute, what: str, **facts: Any) -> Attribute:
    """Record why the attribute has no context reward."""
    summary = f"Context {what}: the attribute reads words alone."
    return with_record(attribute, context={"kept": False, "summary": summary, **facts})


def choose_context(
    attribute: Attribute, reward: ContextReward, trials: Sequence[Trial], record: dict[str, Any]
) -> Attribute:
    """Keep the best weight of a context reward, if it is better than words alone.

    Args:
        attribute: The attribute without context.
        reward: The context reward.
        trials: Words alone first, and the weights.
        record: What else to record.

    Returns:
        The attribute, with the context reward if it helps, and with a record.
    """
    alone, *others = trials
    record = {**record, "level": LEVEL, "trials": [trial._asdict() for trial in trials]}
    allowed = [one for one in others if one.perplexity <= MAX_PERPLEXITY * alone.perplexity]
    best = max(allowed or others, key=lambda trial: trial.probability)
    change = f"{best.probability:.2f} instead of {alone.probability:.2f} at the price of {LEVEL}"
    if not allowed:
        rise = min(one.perplexity for one in others) / alone.perplexity - 1
        return _without(
            attribute, f"does not help here (perplexity rises by {rise:.0%} or more)", **record
        )
    if best.probability <= alone.probability:
        return _without(attribute, f"does not help here ({change})", **record)
    record = {"kept": True, "summary": f"Context helps: {change}.", "weight": best.weight, **record}
    return with_record(attribute.with_context(reward.scaled(best.weight)), context=record)


@dataclass(frozen=True)
class _Work:
    """The steps of a fit with one LM."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    hmm: HMM
    judge: TextClassifier
    probe: Probe
    prompts: RunPrompts
    seed: int
    on_progress: OnStage

    def read(
        self, texts: Sequence[str], scores: Sequence[float], folder: Path, max_states: int
    ) -> TokenStates:
        """Read the states of scored texts."""
        stored = read_states(
            self.lm,
            self.tokenizer,
            encode_texts(self.tokenizer, texts),
            folder,
            max_states=max_states,
            seed=self.seed,
            on_progress=self._stage("states", "tokens"),
        )
        return self._split(stored, scores)

    def sample(self, prompts: Sequence[list[int]], folder: Path, max_states: int) -> TokenStates:
        """Sample texts with their states, and have the judge score them."""
        stored = sample_states(
            self.lm,
            self.tokenizer,
            prompts,
            self.prompts.ends,
            folder,
            max_states=max_states,
            seed=self.seed,
            on_progress=self._stage("samples", "tokens"),
        )
        texts = self.tokenizer.batch_decode(stored.rows(), skip_special_tokens=True)
        scores = self.judge.score(texts, on_progress=self._stage("scores", "texts"))
        return self._split(stored, scores)

    def _stage(self, name: str, unit: str) -> Callable[[int, int], None]:
        return lambda done, total: self.on_progress(name, done, total, unit)

    def _split(self, stored: StoredStates, scores: Sequence[float]) -> TokenStates:
        """Hold out texts, near duplicates together."""
        rows = stored.rows(len(scores))
        known = [text for text, row in enumerate(rows) if row]
        examples = Examples.from_scores(
            [rows[text] for text in known],
            [scores[text] for text in known],
            self.probe.vocab_size,
            known,
        )
        held_out = torch.zeros(len(scores), dtype=torch.bool)
        held_out[Split.of(examples, None, HELD_OUT, self.seed).held_out.groups] = True
        return TokenStates(*stored, torch.tensor(scores), held_out)

    def fit(
        self, data: TokenStates, evidence: Sequence[Evidence], keep: Sequence[int]
    ) -> ContextFit:
        """Fit a context reward. Tokens to keep have no features to learn from."""
        features = self.probe.features.clone()
        features[list(keep)] = 0.0
        rewards = torch.stack([part.dense(len(features)) for part in evidence]).sum(0).float()
        return fit_context(
            data,
            rewards,
            features,
            self.probe.basis,
            self.probe.config.fingerprint,
            seed=self.seed,
            on_progress=self._stage("context", "steps"),
        )

    def trials(self, attribute: Attribute, reward: ContextReward) -> list[Trial]:
        """Steer by words alone, and with each weight of the context reward, at the same price."""
        runs = SteeredRuns(
            self.lm,
            self.prompts.ids,
            ends=self.prompts.ends,
            copies=-(-NUM_TEXTS // len(self.prompts.ids)),
            max_new_tokens=NUM_TOKENS,
            top_p=TOP_P,
            seed=self.seed + 2,  # not the numbers of calibration and report
            on_progress=self.on_progress,
        )
        reader = TextReader(self.tokenizer, attribute, self.judge, runs)
        compiler = Compiler(self.hmm, NUM_TOKENS, self.probe, memory=0)
        start = HMMPrices(self.hmm).strength(attribute, BUDGETS[LEVEL])
        trials = [_try(attribute, 0.0, start, reader, compiler)]
        for weight in WEIGHTS:
            tried = attribute.with_context(reward.scaled(weight))
            start = _expected_strength(weight, trials)
            trials.append(_try(tried, weight, start, reader, compiler))
        return trials


def _try(
    attribute: Attribute, weight: float, start: float, reader: TextReader, compiler: Compiler
) -> Trial:
    """Steer at the price of the level, and judge the texts."""
    stage = f"context x {weight:g}" if weight else "words alone"
    read: dict[float, JudgedTexts] = {}

    def price(strength: float) -> float:
        drawn = reader.runs.draw(compiler.compile(Goal(attribute, strength)), stage)
        read[strength] = reader.read(drawn)
        return read[strength].price

    strength = find_strength(price, BUDGETS[LEVEL], {}, start=start, tolerance=TOLERANCE)
    texts = read[strength]
    probability = float(texts.probabilities.mean())
    return Trial(weight, strength, texts.price, probability, exp(texts.nats))


def _expected_strength(weight: float, trials: Sequence[Trial]) -> float:
    """Return the strength of a weight, as if words and context added their prices.

    The price of each is about proportional to the square of its strength.
    """
    words = trials[0].strength ** -2
    context = PRICE_RATIO * words
    if len(trials) > 1:
        context = max(trials[-1].strength ** -2 - words, 0.0) / trials[-1].weight ** 2
    return float((words + weight**2 * context) ** -0.5)
