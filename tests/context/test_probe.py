"""A probe reads the hidden states of an LM, and never returns a wrong one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from context.heads import HEADS, run, tiny_lm
from fake_cuda import DeviceIndexing, OperationCounter, to_fake_cuda
from foretrace.context import Head, Probe
from foretrace.context.measure import logit_error, state_error, synthetic_errors
from foretrace.errors import InvalidFileError, InvalidInputError

INFINITY = float("inf")


@pytest.fixture(scope="module", params=HEADS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lm(kind: str) -> Any:
    return tiny_lm(kind)


@pytest.fixture(scope="module")
def probe(lm: Any) -> Probe:
    return Probe.build(Head.of_model(lm), features=8, source="tiny")


def test_states_are_those_of_the_lm(lm: Any, probe: Probe, kind: str) -> None:
    logits, states = run(lm)
    assert state_error(probe, logits, states) < 1e-4
    assert logit_error(probe, Head.of_model(lm), logits) < 1e-4
    assert state_error(probe, logits.bfloat16(), states) < 2e-2
    log_probabilities = logits.log_softmax(-1)
    if kind == "tanh cap":  # the constant is inside the tanh
        assert not probe.read(log_probabilities).readable.any()
    else:
        assert state_error(probe, log_probabilities, states) < 1e-4


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether rows stay readable
    "bad words": (lambda z: z[:, :4].fill_(-INFINITY), True),
    "masked by a number": (lambda z: z[:, 7:11].fill_(torch.finfo(z.dtype).min), True),
    "a logit bias": (lambda z: z[:, 3:6].add_(40.0), True),
    "a negative logit bias": (lambda z: z[:, 3:4].sub_(100.0), True),
    "not a number": (lambda z: z[:, 5:6].fill_(float("nan")), True),
    "a grammar": (lambda z: z[:, 5:].fill_(-INFINITY), False),
    "half masked": (lambda z: z[:, ::2].fill_(-INFINITY), False),
    "half biased": (lambda z: z[:, ::2].add_(3.0), False),
    "everything masked": (lambda z: z.fill_(-INFINITY), False),
    "noise": (lambda z: z.add_(torch.randn(z.shape, generator=torch.Generator())), False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_logits_are_left_out_or_refused(lm: Any, probe: Probe, change: str) -> None:
    logits, states = run(lm)
    edit, stays_readable = CHANGES[change]
    values = logits[:, probe.tokens]
    edit(values)
    logits[:, probe.tokens] = values
    logits[0] = run(lm)[0][0]  # other rows do not matter
    found, readable = probe.read(logits)
    assert readable[0]
    if probe.config.softcap is None:  # else a bias may exceed the cap, or stay below it
        assert readable[1:].tolist() == [stays_readable] * (len(logits) - 1)
    assert (found[~readable] == 0).all()
    errors = (found - states).norm(dim=1) / states.norm(dim=1)
    assert errors[readable].max() < 1e-4
    assert not probe.read(logits, solve=False).readable[1:].any()


@pytest.mark.parametrize("penalty", [1.02, 1.1, 1.3, 2.0])
def test_penalties_never_make_a_wrong_state(lm: Any, probe: Probe, penalty: float) -> None:
    """What is too small to be noticed is smaller than the noise of bfloat16."""
    logits, states = run(lm)
    seen = probe.tokens[::20]
    scores = logits[:, seen]
    logits[:, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    found, readable = probe.read(logits)
    errors = (found - states).norm(dim=1) / states.norm(dim=1)
    assert errors[readable].max() < 2e-2


def test_a_step_takes_a_fixed_number_of_operations_and_does_not_wait() -> None:
    model = tiny_lm("tanh cap")
    probe, mode = Probe.build(Head.of_model(model), features=8), FakeTensorMode()
    logits, _ = run(model)
    counts = []
    for rows in (1, 24):
        on_device, fake_logits = to_fake_cuda((probe, logits[:rows]), mode)
        with mode, DeviceIndexing(), OperationCounter() as counter:
            on_device.read(fake_logits, solve=False)
        counts.append(len(counter.names))
    assert counts[0] == counts[1] <= 40


def test_the_choice_is_deterministic_and_respects_the_head() -> None:
    head = replace(Head.of_model(tiny_lm("tied")), excluded=frozenset(range(250, 300)))
    tokens = Probe.build(head, features=8).tokens
    assert torch.equal(tokens, Probe.build(head, features=8).tokens)
    assert (tokens.diff() > 0).all()
    assert len(tokens) == 4 * 32
    assert tokens.max() < 250


def test_the_choice_avoids_rows_that_pad_the_vocabulary() -> None:
    head = Head.of_model(tiny_lm("untied"))
    padded = head.weight.clone()
    padded[200:] = 0.0
    probe = Probe.build(replace(head, weight=padded))
    assert probe.tokens.max() < 200
    assert probe.config.condition < 10


def test_the_tokens_of_a_model_exclude_its_special_ones() -> None:
    from tiny_lm import chat_tokenizer
    from tiny_lm import tiny_model as word_model

    tokenizer = chat_tokenizer()
    head = Head.of_model(word_model(tokenizer), tokenizer)
    assert {0, 1} <= head.excluded < set(range(len(tokenizer)))
    assert not set(Probe.build(head).tokens.tolist()) & head.excluded


def test_features_are_white() -> None:
    head = Head.of_model(tiny_lm("tied"))
    probe = Probe.build(head, features=64)  # no more than the head has
    features = probe.features.float()
    assert features.mean(0).abs().max() < 1e-3
    covariance = features.T @ features / len(features)
    assert (covariance - torch.eye(32)).abs().max() < 1e-2
    assert probe.config.variance_kept == pytest.approx(1.0)
    few = Probe.build(head, features=4)
    assert few.config.variance_kept < 0.3
    torch.testing.assert_close(few.features, probe.features[:, :4])


def test_writers_become_coefficients_of_features() -> None:
    head = Head.of_model(tiny_lm("tied"))
    writers = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    wanted = (head.weight - head.weight.mean(0)) @ writers.T
    for count in (32, 8):
        probe = Probe.build(head, features=count)
        features = probe.features.float()
        found = features @ probe.project(writers).T
        if count < 32:
            best = torch.linalg.lstsq(features, wanted).solution
            torch.testing.assert_close(probe.project(writers).T, best, atol=5e-3, rtol=5e-3)
            writers = (writers @ probe.basis) @ probe.basis.T  # in the span of the basis
            wanted = (head.weight - head.weight.mean(0)) @ writers.T
            found = features @ probe.project(writers).T
        torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


def test_saved_probes_read_the_same(lm: Any, probe: Probe, tmp_path: Path) -> None:
    file = tmp_path / "folder" / "probe.safetensors"
    probe.with_errors(synthetic_errors(probe)).save(file)
    loaded = Probe.load(file, fingerprint=Head.of_model(lm).fingerprint)
    assert loaded.config.errors["synthetic states, float32"] < 1e-4
    assert replace(loaded.config, errors={}) == probe.config
    logits, _ = run(lm)
    assert torch.equal(loaded.read(logits).states, probe.read(logits).states)
    with pytest.raises(InvalidInputError, match=r"made for tiny.* make a probe for it"):
        Probe.load(file, fingerprint="sha256:0")


def test_a_probe_of_a_quantised_head_serves_attributes_of_the_original(tmp_path: Path) -> None:
    head = Head.of_model(tiny_lm("tied"))
    noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0))
    noise *= head.weight.norm() / noise.norm()
    quantised = replace(head, weight=head.weight + 0.1 * noise)
    for original in (head, Probe.build(head, features=8)):
        probe = Probe.build(quantised, features=8, original=original)
        probe.save(tmp_path / "probe")
        loaded = Probe.load(tmp_path / "probe", fingerprint=quantised.fingerprint)
        assert loaded.serves(head.fingerprint)
        assert loaded.serves(quantised.fingerprint)
        assert not loaded.serves("sha256:0")
        with pytest.raises(InvalidInputError, match="make a probe for it"):  # of the LM in use
            loaded.require_head(head.fingerprint)
        for weight in (head.weight + 0.5 * noise, head.weight[:-1]):
            with pytest.raises(InvalidInputError, match="Pass the LM that this one was quantised"):
                Probe.build(replace(head, weight=weight), features=8, original=original)


def test_what_cannot_be_a_probe_is_refused(tmp_path: Path) -> None:
    head = Head.of_model(tiny_lm("tied"))
    probe = Probe.build(head, features=8)
    with pytest.raises(InvalidInputError, match="one column for each token"):
        probe.read(torch.zeros(2, 299))
    with pytest.raises(InvalidInputError, match="at least 1 feature"):
        Probe.build(head, features=0)
    with pytest.raises(InvalidInputError, match="too few"):
        Probe.build(replace(head, excluded=frozenset(range(270))))
    flat = head.weight.clone()
    flat[:, 0] = flat[:, 1]
    with pytest.raises(InvalidInputError, match="does not determine the hidden state"):
        Probe.build(replace(head, weight=flat))
    with pytest.raises(InvalidFileError, match="no file"):
        Probe.load(tmp_path / "none.safetensors")
    probe.save(tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-100])
    with pytest.raises(InvalidFileError, match="damaged or cut short"):
        Probe.load(tmp_path / "cut.safetensors")


def damaged_probes(probe: Probe) -> dict[str, Probe]:
    """Return probes that must not be loaded, by the words of the error."""
    lost, high = probe.inverse.clone(), probe.tokens.clone()
    lost[0, 0], high[-1] = float("nan"), 300
    config = replace(probe.config, scale=0.0)
    return {
        "tensor 'bias' has shape": replace(probe, bias=probe.bias[:-1]),
        "tensor 'features' has shape": replace(probe, features=probe.features[0]),
        "tensor 'features' has type": replace(probe, features=probe.features.float()),
        "tensor 'basis' has shape": replace(probe, basis=probe.basis[:, 1:]),
        "not finite": replace(probe, inverse=lost),
        "outside the vocabulary": replace(probe, tokens=high),
        "not ascending": replace(probe, tokens=probe.tokens.roll(1)),
        "no number above zero": replace(probe, config=config),
    }


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    probe = Probe.build(Head.of_model(tiny_lm("tied")), features=8)
    for words, damaged in damaged_probes(probe).items():
        damaged.save(tmp_path / "damaged.safetensors")
        with pytest.raises(InvalidFileError, match=words):
            Probe.load(tmp_path / "damaged.safetensors")


def test_logits_of_another_head_are_not_readable(probe: Probe) -> None:
    generator = torch.Generator().manual_seed(1)
    other = torch.randn(4, 32, generator=generator) @ torch.randn(32, 300, generator=generator)
    assert not probe.read(other).readable.any()
    with pytest.raises(InvalidInputError, match="4 of 4 rows of logits do not fit"):
        state_error(probe, other, torch.zeros(4, 32))
