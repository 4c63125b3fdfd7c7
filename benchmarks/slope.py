"""Measure how much a judge's score rises with the price of steering, by kind of reward.

For weak steering by rewards r with strength k, the mean score of a judge rises by k times the
covariance of the score and the sum of a text's rewards, each less its mean over next tokens. The
price is k^2 / 2 times the variance of the next token's reward. Both are known from texts of the
bare LM, so that thousands of texts compare rewards without steering. The slope is the rise that
0.15 nats per token, the budget of `strong`, would buy if it went on in a straight line.

FORETRACE_DATA names the folder of data. The judge is a classifier of whole texts on the LM's middle
layer. Context rewards are fitted to one half of the texts, and all figures are of the other half.
--quick measures one attribute on few texts: it shows that the benchmark runs.
"""

import os
import tempfile
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrace import HMM, Attribute, _tabular
from foretrace.attribute.fitting.context import TokenStates, fit_context
from foretrace.context import Head, Probe
from foretrace.engines.prompts import encode_prompts
from foretrace.engines.transformers.judged_runs import fit_judge
from foretrace.engines.transformers.token_states import StoredStates, sample_states
from foretrace.lookahead.levels import BUDGETS
from harness import Report, options
from price import EXAMPLES
from smollm2 import find_smollm2

NAMES = ("positive", "political", "nontoxic")
NUM_TOKENS, QUICK_TOKENS = 80_000, 2_000
ALTERNATIVES = 32  # next tokens that are drawn at every position
WEIGHTS = 0.25, 0.5, 1.0  # of context, in units of the deviation of the words' rewards


class Rewards(NamedTuple):
    """Rewards of the tokens of texts, and of the alternatives, each less the mean of the latter."""

    chosen: Tensor  # (N,)
    alternatives: Tensor  # (N, ALTERNATIVES)

    def plus(self, other: "Rewards", weight: float) -> "Rewards":
        """Add other rewards, with a weight relative to the own deviation."""
        scale = weight * self.alternatives.std() / other.alternatives.std().clamp_min(1e-9)
        return Rewards(
            self.chosen + scale * other.chosen, self.alternatives + scale * other.alternatives
        )


class Samples(NamedTuple):
    """Texts of the bare LM."""

    states: StoredStates
    alternatives: Tensor  # (N, ALTERNATIVES) token ids
    measured: Tensor  # (N,) whether the token's text is measured

    def words(self, attribute: Attribute, vocab_size: int) -> Rewards:
        """Return the rewards of an attribute's words."""
        table = rewards_of(attribute, vocab_size)
        return self._centred(table[self.states.tokens], table[self.alternatives])

    def context(self, probe: Probe, scores: Tensor, words: Attribute) -> Rewards:
        """Return context rewards, fitted to the texts that are not measured."""
        held_out = torch.zeros(len(scores), dtype=torch.bool)
        held_out[self.states.texts[self.measured]] = True
        table = rewards_of(words, probe.vocab_size)
        data = TokenStates(*self.states, scores, held_out)
        reward = fit_context(
            data, table, probe.features, probe.basis, probe.config.fingerprint
        ).reward
        writers, features = probe.project(reward.writers), probe.features.float()
        chosen, others = [], []
        for rows in torch.split(torch.arange(len(self.states.tokens)), 4096):
            states = torch.nn.functional.pad(data.read(rows), (0, 1), value=1.0)
            read = states @ reward.readers.T @ writers
            chosen.append((read * features[self.states.tokens[rows]]).sum(1))
            others.append(torch.einsum("nk,nmk->nm", read, features[self.alternatives[rows]]))
        return self._centred(torch.cat(chosen), torch.cat(others))

    def slope(self, rewards: Rewards, scores: Tensor) -> float:
        """Return how much the mean score would rise at the budget of `strong`."""
        kept, texts = self.measured, self.states.texts[self.measured]
        sums = torch.zeros(len(scores)).index_add(0, texts, rewards.chosen[kept])
        measured = torch.zeros(len(scores), dtype=torch.bool)
        measured[texts] = True
        pair = torch.stack([sums[measured], scores[measured]])
        price = rewards.alternatives[kept].var(1).mean() / 2
        return float(pair.cov(correction=0)[0, 1] * (BUDGETS["strong"] / price).sqrt())

    @staticmethod
    def _centred(chosen: Tensor, alternatives: Tensor) -> Rewards:
        mean = alternatives.mean(1)
        return Rewards(chosen - mean, alternatives - mean[:, None])


def rewards_of(attribute: Attribute, vocab_size: int) -> Tensor:
    """Return the reward of each token, (V,)."""
    return torch.stack([one.dense(vocab_size) for one in attribute.evidence]).sum(0).float()


def main() -> None:
    """Measure every attribute."""
    args = options(__doc__)
    report = Report("Rise of the judge's score at 0.15 nats per token, by kind of reward")
    data = Path(os.environ["FORETRACE_DATA"])
    make = run_path(str(EXAMPLES / "attributes" / "make.py"))
    maker = make["Maker"](data, str(find_smollm2()), HMM.from_pretrained(EXAMPLES / "smollm2-135m"))
    head = Head.of_model(maker.model, maker.tokenizer)
    probe = Probe.build(head)
    with tempfile.TemporaryDirectory() as folder:
        samples = draw(maker, head, Path(folder), QUICK_TOKENS if args.quick else NUM_TOKENS)
        for name in NAMES[:1] if args.quick else NAMES:
            measure(report, maker, make["SOURCES"][name], name, samples, probe)
    report.publish(args.json)


@torch.inference_mode()
def draw(maker: Any, head: Head, folder: Path, count: int) -> Samples:
    """Sample texts of the LM, and alternatives to their tokens."""
    rows = _tabular.read_rows(maker.data / "detox/train_prompts.jsonl.xz", ["prompt"])
    prompts = encode_prompts(maker.tokenizer, [row["prompt"] for row in rows])
    ends = maker.hmm.config.eos_token_ids
    states = sample_states(maker.model, maker.tokenizer, prompts, ends, folder, max_states=count)
    torch.manual_seed(0)
    alternatives = [
        torch.multinomial(head.logits(part.float()).softmax(-1), ALTERNATIVES, replacement=True)
        for shard in states.shards
        for part in torch.split(shard, 256)
    ]
    return Samples(states, torch.cat(alternatives), states.texts % 2 == 1)


def measure(
    report: Report, maker: Any, source: Any, name: str, samples: Samples, probe: Probe
) -> None:
    """Add the slopes of one attribute."""
    texts, labels = maker.read(source.train, source)
    judge = fit_judge(maker.model, maker.tokenizer, texts, labels)
    assert judge is not None
    written = maker.tokenizer.batch_decode(samples.states.rows(), skip_special_tokens=True)
    scores = torch.tensor(judge.score(written)).float()
    frequencies = maker.lm_settings["frequencies"]
    kinds = {"words": {}, "priced": {"frequencies": frequencies}, "shared": maker.lm_settings}
    rewards = {}
    for kind, given in kinds.items():
        attribute = maker.fit(name, source, **given)
        rewards[kind] = samples.words(attribute, probe.vocab_size)
        report.add(f"{name}, {kind}", samples.slope(rewards[kind], scores), "")
    context = samples.context(probe, scores, attribute)
    report.add(f"{name}, context alone", samples.slope(context, scores), "")
    for weight in WEIGHTS:
        both = rewards["shared"].plus(context, weight)
        report.add(f"{name}, shared + {weight:g} context", samples.slope(both, scores), "")


if __name__ == "__main__":
    main()
