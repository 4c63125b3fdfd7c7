"""Test fidelity: expectations match the lookahead, and an LM that is the HMM."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.attribute import Attribute
from foretrace.evaluate import fidelity
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from forked import Run
from tiny import TOKENS, tiny_hmm
from tiny_attributes import attributes
from tiny_lm import WORDS


@pytest.mark.parametrize("name", ["one", "mixture", "not", "all"])
def test_expectation_is_the_mean_of_the_eap(name: str) -> None:
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()[name], 5)
    prefix = [1, 2]
    predicted = lookahead.predicted(torch.tensor(prefix))
    emitted_weight = fidelity._emitted_weight(lookahead)
    next_token = hmm.emission.predict(predicted)[0]
    for ahead in (1, 3, 5):
        mean = float(next_token @ lookahead.eap(torch.tensor(prefix), ahead - 1))
        expected = fidelity._expected_probability(lookahead, emitted_weight, predicted, ahead)
        assert expected == pytest.approx(mean, abs=1e-9)
    assert lookahead.predicted(torch.tensor([])).shape == (1, hmm.num_states)
    assert len(next_token) == TOKENS


def test_concordance_of_four_continuations() -> None:
    expected = np.array([0.1, 0.5, 0.5, 0.9])
    violated = np.array([True, False, True, False])
    tokens = np.array([1, 2, 3, 3])
    # Pairs (violated, other): (0, 1) and (0, 3) are correct, (2, 1) is a tie, and (2, 3) share a
    # first token.
    assert fidelity.concordance(expected, violated, tokens) == (2.5, 3.0)
    assert fidelity.concordance(expected, np.zeros(4, bool), tokens) == (0.0, 0.0)


def test_calibration_of_two_prefixes() -> None:
    bins = fidelity.calibration([0.9, 0.1], [1.0, 0.0])
    assert bins == [{"expected": 0.1, "observed": 0.0}, {"expected": 0.9, "observed": 1.0}]


class LMThatIsTheHMM:
    """A stand-in for an LM whose distribution is exactly an HMM's. Its cache is the text."""

    device = torch.device("cpu")

    def __init__(self, hmm: HMM) -> None:
        self.hmm = hmm

    def __call__(self, input_ids: torch.Tensor, past_key_values: Any, **_: Any) -> Any:
        previous = getattr(past_key_values, "token_ids", None)
        if previous is not None and len(previous) != len(input_ids):
            previous = previous.repeat_interleave(len(input_ids) // len(previous), 0)
        ids = input_ids if previous is None else torch.cat([previous, input_ids], 1)
        past_key_values.token_ids = ids
        predicted = self.hmm.filter(ids).predicted[:, -1]
        logits = self.hmm.emission.predict(predicted).log()[:, None]
        return type("Output", (), {"logits": logits})()


def test_probe_learns_a_linear_feature_of_the_state() -> None:
    rng, linear_probe = np.random.default_rng(0), fidelity.Probe()
    for _ in range(10):
        states = rng.normal(size=(20, 3))
        linear_probe.add(states, states[:, 0] > 0)
    pairs = [
        fidelity.concordance(expected, violated, np.arange(20))
        for expected, violated in zip(linear_probe.expected(), linear_probe.violated, strict=True)
    ]
    assert sum(correct for correct, _ in pairs) / sum(total for _, total in pairs) > 0.95
    one_class = fidelity.Probe([np.zeros((2, 3))], [np.zeros(2, bool)])
    assert one_class.expected()[0].tolist() == [0.5, 0.5]


def test_fidelity_command(run: Run, tiny_lm: Path, tmp_path: Path) -> None:
    HMM.random(8, len(WORDS), eos_token_id=0, seed=0).save_pretrained(tmp_path / "hmm")
    odd = (torch.arange(len(WORDS)) % 2).float().clamp_min(0.3)
    Attribute.from_weights(odd).save(tmp_path / "odd.safetensors")
    (tmp_path / "prompts.txt").write_text("w1 w2\nw3\nw5 w4\n")
    options = ["--attributes", tmp_path, "--prompts", tmp_path / "prompts.txt"]
    options += ["--rollouts", 8, "--out", tmp_path / "out", "--transform", "2,0", "--probe"]
    misspelt = run("fidelity", "no-such-lm", "--hmm", tmp_path / "hmm", "--goal", "od", *options)
    assert "Did you mean odd?" in misspelt.err
    done = run("fidelity", tiny_lm, "--hmm", tmp_path / "hmm", "--goal", "odd", *options)
    assert done.code == 0, done.err
    assert "2 to 3" in done.out
    summary = json.loads((tmp_path / "out" / "fidelity.json").read_text())
    assert summary["prompts"] == 3
    assert all(0 <= facts["probe"] <= 1 for facts in summary["within a prefix"].values())
    assert (tmp_path / "out" / "fidelity.png").read_bytes().startswith(b"\x89PNG")


def test_expectations_agree_with_an_lm_that_is_the_hmm() -> None:
    hmm = HMM.random(6, len(WORDS), eos_token_id=0, seed=0)
    weights = (torch.arange(len(WORDS)) % 4 != 1).double() * 0.4 + 0.6
    lookahead = Lookahead(hmm, Attribute.from_weights(weights.float()), 20)
    prefixes = [[first, second] for first in (3, 9, 33) for second in (5, 40)]
    lm: Any = LMThatIsTheHMM(hmm)
    measured = fidelity.measure_fidelity(lm, lookahead, prefixes, ends=[0], rollouts=400)
    for ahead, expected in measured.expected.items():
        np.testing.assert_allclose(expected, measured.observed[ahead], atol=0.06)
    summary = measured.summary()
    assert set(summary["across prefixes"]) == {2, 10, 20}
    assert all(0 <= facts["concordance"] <= 1 for facts in summary["within a prefix"].values())
