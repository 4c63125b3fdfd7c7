"""Fidelity: expectations are the lookahead's own; an LM that is the HMM agrees with them."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace import cli
from foretrace.attribute import Attribute
from foretrace.evaluate import fidelity, probe
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from tiny import TOKENS, tiny_hmm
from tiny_attributes import attributes
from tiny_lm import WORDS


@pytest.mark.parametrize("name", ["one", "mixture", "not", "all"])
def test_the_expectation_is_the_mean_of_eap(name: str) -> None:
    hmm = tiny_hmm("dense")
    lookahead = Lookahead(hmm, attributes()[name], 5)
    prefix = [1, 2]
    predicted, kept = lookahead.predicted(torch.tensor(prefix)), fidelity._kept(lookahead)
    next_token = hmm.emission.predict(predicted)[0]
    for ahead in (1, 3, 5):
        mean = float(next_token @ lookahead.eap(torch.tensor(prefix), ahead - 1))
        assert fidelity._value(lookahead, kept, predicted, ahead) == pytest.approx(mean, abs=1e-9)
    assert lookahead.predicted(torch.tensor([])).shape == (1, hmm.num_states)
    assert len(next_token) == TOKENS


def test_concordance_by_hand() -> None:
    expected = np.array([0.1, 0.5, 0.5, 0.9])
    violated = np.array([True, False, True, False])
    tokens = np.array([1, 2, 3, 3])
    # Pairs (violated, not): (0, 1) right, (0, 3) right, (2, 1) half; (2, 3) share a first token.
    assert fidelity.concordance(expected, violated, tokens) == (2.5, 3.0)
    assert fidelity.concordance(expected, np.zeros(4, bool), tokens) == (0.0, 0.0)


def test_calibration_by_hand() -> None:
    bins = fidelity.calibration([0.9, 0.1], [1.0, 0.0])
    assert bins == [{"expected": 0.1, "observed": 0.0}, {"expected": 0.9, "observed": 1.0}]


class LMThatIsTheHMM:
    """Stands in for an LM that is an HMM: no trained one is so here. Its cache is the text."""

    device = torch.device("cpu")

    def __init__(self, hmm: HMM) -> None:
        self.hmm = hmm

    def __call__(self, input_ids: torch.Tensor, past_key_values: Any, **_: Any) -> Any:
        written = getattr(past_key_values, "written", None)
        if written is not None and len(written) != len(input_ids):
            written = written.repeat_interleave(len(input_ids) // len(written), 0)
        ids = input_ids if written is None else torch.cat([written, input_ids], 1)
        past_key_values.written = ids
        predicted = self.hmm.filter(ids).predicted[:, -1]
        logits = self.hmm.emission.predict(predicted).log()[:, None]
        return type("Output", (), {"logits": logits})()


def test_a_probe_finds_what_the_state_says() -> None:
    rng, found = np.random.default_rng(0), probe.Probe()
    for _ in range(10):
        states = rng.normal(size=(20, 3))
        found.add(states, states[:, 0] > 0)
    ranked = [
        fidelity.concordance(own, bad, np.arange(20))
        for own, bad in zip(found.expected(), found.violated, strict=True)
    ]
    assert sum(right for right, _ in ranked) / sum(count for _, count in ranked) > 0.95
    nothing = probe.Probe([np.zeros((2, 3))], [np.zeros(2, bool)])
    assert nothing.expected()[0].tolist() == [0.5, 0.5]


def test_on_the_command_line(
    tiny_lm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    HMM.random(8, len(WORDS), eos_token_id=0, seed=0).save_pretrained(tmp_path / "hmm")
    odd = (torch.arange(len(WORDS)) % 2).float().clamp_min(0.3)
    Attribute.from_weights(odd).save(tmp_path / "odd.safetensors")
    (tmp_path / "prompts.txt").write_text("w1 w2\nw3\nw5 w4\n")
    command = ["foretrace", "fidelity", tiny_lm, "--hmm", tmp_path / "hmm", "--goal", "odd"]
    command += ["--attributes", tmp_path, "--prompts", tmp_path / "prompts.txt"]
    command += ["--rollouts", 8, "--out", tmp_path / "out", "--strength", 2, "--probe"]
    monkeypatch.setattr(sys, "argv", [str(part) for part in command])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert "2 to 20" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "fidelity.json").read_text())
    assert written["prompts"] == 3
    assert all(0 <= own["probe"] <= 1 for own in written["within a prefix"].values())
    assert (tmp_path / "out" / "fidelity.png").read_bytes().startswith(b"\x89PNG")


def test_an_lm_that_is_the_hmm_agrees() -> None:
    hmm = HMM.random(6, len(WORDS), eos_token_id=0, seed=0)
    weights = (torch.arange(len(WORDS)) % 4 != 1).double() * 0.4 + 0.6
    lookahead = Lookahead(hmm, Attribute.from_weights(weights.float()), 20)
    prefixes = [[first, second] for first in (3, 9, 12, 33) for second in (5, 14, 40)]
    lm: Any = LMThatIsTheHMM(hmm)
    found = fidelity.measure_fidelity(lm, lookahead, prefixes, ends=[0], rollouts=400)
    for ahead, expected in found.expected.items():
        np.testing.assert_allclose(expected, found.observed[ahead], atol=0.06)
    summary = found.summary()
    assert set(summary["across prefixes"]) == {2, 10, 20}
    assert all(0 <= own["concordance"] <= 1 for own in summary["within a prefix"].values())
