"""A context reward is fitted with the LM, and kept only if steered texts are better with it."""

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import PreTrainedModel

from foretrace.attribute import Attribute, ContextReward
from foretrace.engines.transformers.context import WEIGHTS, Trial, add_context, choose_context
from foretrace.engines.transformers.judged_runs import fit_judge
from foretrace.hmm import HMM
from foretrace.lookahead.levels import BUDGETS
from parity_texts import EVEN, scored_texts
from tiny_lm import WORDS, tiny_hmm, word_tokenizer

TOKENIZER = word_tokenizer()
EVIDENCE = Attribute.from_rewards(torch.tensor(EVEN) - 0.5, first_only=False, name="even")


@pytest.mark.parametrize(
    ("others", "weight", "summary"),
    [
        ([(0.60, 20.5), (0.70, 20.5)], 1.0, "Context helps: 0.70 instead of 0.64"),
        ([(0.66, 20.5), (0.70, 20.7)], 0.5, "Context helps: 0.66 instead of 0.64"),
        ([(0.63, 19.0), (0.64, 20.0)], None, "(0.64 instead of 0.64 at the price of strong)"),
        ([(0.70, 22.0), (0.70, 24.0)], None, "(perplexity rises by 10% or more)"),
    ],
)
def test_the_best_weight_is_kept_if_it_helps(
    others: list[tuple[float, float]], weight: float | None, summary: str
) -> None:
    trials = [Trial(0.0, 3.0, 0.15, 0.64, 20.0)]
    for tried, figures in zip(WEIGHTS, others, strict=False):
        trials.append(Trial(tried, 2.0, 0.15, *figures))
    reward = ContextReward(torch.ones(1, 3), torch.ones(1, 2), "sha256:0")
    chosen = choose_context(EVIDENCE, reward, trials, {"source": "texts"})
    record = chosen.config.fit["context"]
    assert summary in record["summary"]
    assert record["kept"] is (weight is not None)
    assert len(record["trials"]) == len(trials)
    if weight is None:
        assert chosen.context is None
    else:
        assert chosen.context is not None
        assert torch.equal(chosen.context.writers, weight * reward.writers)


def texts_with_order() -> tuple[list[str], list[float]]:
    """Texts whose words say something, and their order more: two kinds of words meet, or do not."""
    source, texts, scores = random.Random(0), [], []
    kinds = WORDS[1:20], WORDS[20:39]
    for number in range(400):
        side = number % 2
        first = [source.choice(kinds[0]) for _ in range(8)]
        second = [source.choice(kinds[1]) for _ in range(8)]
        words = (
            [*first, *second]
            if side
            else [w for pair in zip(first, second, strict=True) for w in pair]
        )
        words[source.randrange(16)] = source.choice(WORDS[40:50] if side else WORDS[50:60])
        texts.append(" ".join(words))
        scores.append(float(side))
    return texts, scores


@pytest.mark.parametrize("prompts", [(), ("w1 w2", "w3")])
def test_words_alone_are_compared_with_context_at_the_same_price(
    model: PreTrainedModel, tmp_path: Path, prompts: tuple[str, ...]
) -> None:
    """With an HMM of one state, as if there were none."""
    texts, scores = texts_with_order()
    hmm = HMM.unigram(torch.ones(len(WORDS)), eos_token_ids=[0])
    stages: list[str] = []
    chosen = add_context(
        model,
        TOKENIZER,
        hmm,
        EVIDENCE,
        judge=fit_judge(model, TOKENIZER, texts, scores),
        texts=texts,
        scores=scores,
        folder=tmp_path / "even.states",
        prompts=prompts,
        keep=[5],
        max_states=8_000 if prompts else 4_000,  # beyond the standard error
        on_progress=lambda stage, done, total, unit: stages.append(stage),
    )
    record = chosen.config.fit["context"]
    assert record["source"] == ("samples" if prompts else "texts")
    assert not (tmp_path / "even.states").exists()
    assert (chosen.context is not None) is record["kept"]
    assert record["loss"] < record["loss_without"]
    assert [trial["weight"] for trial in record["trials"]] == [0.0, *WEIGHTS]
    for trial in record["trials"]:
        assert trial["price"] == pytest.approx(BUDGETS["strong"], rel=0.15)
    assert ("samples" if prompts else "states") in stages


def test_what_nobody_can_judge_has_no_context(model: PreTrainedModel, tmp_path: Path) -> None:
    texts, scores = scored_texts(meaningful=False)
    judge = fit_judge(model, TOKENIZER, texts, scores)
    hmm = tiny_hmm(TOKENIZER)
    chosen = add_context(
        model, TOKENIZER, hmm, EVIDENCE, judge=judge, texts=texts, scores=scores, folder=tmp_path
    )
    assert chosen.context is None
    assert "no classifier of whole texts" in chosen.config.fit["context"]["summary"]
