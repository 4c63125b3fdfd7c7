"""Test the plug-ins of other methods on a tiny LM."""

import json
import sys
from copy import deepcopy
from importlib.util import find_spec
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("yaml", reason="needs the extra `evaluate`")

from foretrace import _io
from foretrace.errors import InvalidFileError
from foretrace.evaluate.suite import AttributePlan
from page_runner import PROJECT
from tiny_lm import tiny_model, word_tokenizer

sys.path.insert(0, str(PROJECT / "benchmarks"))

from peers import dexperts, fine_tuning, lm_steer, sasa, self_debiasing, token_bias
from peers.experts import ANTI_EXPERT, EXPERT, load_expert
from peers.head_fit import FitSettings, fit_change, held_out_gain
from peers.lm_steer import MAP, LowRankMap
from peers.lora import FineTuning, LoraSettings, train_adapter
from peers.parts import part, read_record
from peers.second_model import SecondModel, insert_text
from peers.sides import Sides, read_sides
from peers.states import StateReader
from peers.token_bias import BIAS, TokenBias

# peft 0.21 uses a name that transformers 5 has replaced.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

PROMPTS = [[0, 5, 6, 7], [0, 9]]
TEXTS = [f"w{number % 7} w{number % 5 + 20} w{number % 3 + 30}" for number in range(40)]
OTHERS = [f"w{number % 9 + 40} w{number % 4 + 50} w{number % 3}" for number in range(40)]
SETTINGS = LoraSettings(rank=2, learning_rate=0.02, rows=4, checkpoint_steps=3)


@pytest.fixture
def lm() -> Any:
    model = tiny_model(word_tokenizer())
    model.train(False)
    return model


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETRACE_RESULTS", str(tmp_path))
    return tmp_path


@torch.inference_mode()
def test_a_second_model_predicts_what_a_full_pass_predicts(lm: Any) -> None:
    second, copies = SecondModel(lm, PROMPTS), 2
    rows = torch.tensor([[0, 5, 6, 7]] * 2 + [[0, 0, 0, 9]] * 2)  # padded on the left
    for step in range(3):
        logits = second.next_logits(rows)
        for row, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(copies)):
            ids = torch.tensor([[*prompt, *rows[row, 4:].tolist()]])
            torch.testing.assert_close(logits[row], lm(ids).logits[0, -1], rtol=1e-4, atol=1e-4)
        rows = torch.cat([rows, torch.tensor([[1 + step], [2], [3], [4]])], 1)


def test_text_is_inserted_after_a_special_token() -> None:
    assert insert_text([[0, 5], [6]], [8, 9], special=[0]) == [[0, 8, 9, 5], [8, 9, 6]]


def test_self_debiasing_follows_the_paper() -> None:
    logits = torch.tensor([[0.5, 0.5]]).log()
    contrary = torch.tensor([[0.9, 0.1]]).log()
    debiased = self_debiasing.debias(logits, contrary, decay=2.0)
    assert debiased[0].tolist() == pytest.approx([log(0.5 * exp(-2 * 0.4)), log(0.5)])
    strong = self_debiasing.debias(logits, contrary, decay=100.0)
    assert strong[0, 0].item() == pytest.approx(log(0.5 * 0.01))


@torch.inference_mode()
def test_self_debiasing_reads_the_contrary_instruction(lm: Any) -> None:
    plugin = self_debiasing.build(lm, word_tokenizer(), contrary="w40 w41", decay=50.0)
    assert plugin.processor is not None
    rows = torch.tensor([[0, 5, 6, 7], [0, 0, 0, 9]])
    logits = torch.stack([lm(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    changed = plugin.processor(PROMPTS)(rows, logits)
    contrary = lm(torch.tensor([[0, 41, 42, 9]])).logits[:, -1]
    expected = self_debiasing.debias(logits[1:], contrary, 50.0)
    torch.testing.assert_close(changed[1:], expected, rtol=1e-4, atol=1e-4)


def test_the_nucleus_is_kept() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.95, 0.03, 0.01, 0.01]]).log()
    kept = dexperts.keep_nucleus(logits, 0.9).isfinite()
    assert kept.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert torch.equal(dexperts.keep_nucleus(logits, 1.0), logits)


def test_sides_are_drawn_from_all_texts(tmp_path: Path) -> None:
    rows = [0.9, 0.5, 0.1, 0.6, 0.3]
    lines = [f'{{"text": "t{score}", "toxicity": {score}}}\n' for score in rows]
    (tmp_path / "scored.jsonl").write_text("".join(lines))
    plan = AttributePlan("scored.jsonl", score="toxicity", invert=True)
    sides = read_sides(plan, tmp_path)
    assert set(sides.with_it) == {"t0.1", "t0.3"}
    assert set(sides.without) == {"t0.9", "t0.6"}
    fewer = read_sides(plan, tmp_path, most=1)
    assert fewer == Sides(sides.with_it[:1], sides.without[:1])


def train(lm: Any, folder: Path, texts: list[str] = TEXTS) -> None:
    train_adapter(deepcopy(lm), word_tokenizer(), texts, folder, 0, settings=SETTINGS)


def test_an_interrupted_training_continues(
    lm: Any, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="needs benchmarks/peers/requirements-experts.txt")
    train(lm, results / "whole")
    step = FineTuning._train_on

    def interrupt(self: FineTuning, batch: Any, left: float) -> None:
        if self.step == 7:
            raise KeyboardInterrupt
        step(self, batch, left)

    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "_train_on", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(lm, results / "resumed")
    assert not (results / "resumed").exists()
    steps: list[int] = []
    settings = SETTINGS
    train_adapter(
        deepcopy(lm),
        word_tokenizer(),
        TEXTS,
        results / "resumed",
        0,
        lambda done, total: steps.append(done),
        settings,
    )
    assert steps == [7, 8, 9, 10]  # the checkpoint is that of step 6
    whole, resumed = (
        (results / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "resumed")
    )
    assert whole == resumed
    assert sorted(path.name for path in results.iterdir()) == [
        "resumed",
        "resumed.record.json",
        "whole",
        "whole.record.json",
    ]
    with pytest.raises(InvalidFileError, match="other texts or settings"):
        train(lm, results / "whole", TEXTS[:8])


def test_experts_change_the_logits_as_in_the_paper(lm: Any, results: Path) -> None:
    pytest.importorskip("peft", reason="needs benchmarks/peers/requirements-experts.txt")
    train(lm, part("a", EXPERT))
    train(lm, part("a", ANTI_EXPERT), [f"w{number + 40}" for number in range(20)])
    assert read_record(part("a", EXPERT))["texts"] == 40
    expert = fine_tuning.build(lm, word_tokenizer(), attribute="a")
    ids = torch.tensor([[0, 5, 6, 7]])
    assert expert.model is not None
    bare = lm(ids).logits[:, -1].detach()
    towards = expert.model(ids).logits[:, -1].detach()
    assert not torch.allclose(bare, towards, atol=0.01)
    same = dexperts.build(lm, word_tokenizer(), attribute="a", alpha=0.0)
    combined = dexperts.build(lm, word_tokenizer(), attribute="a", alpha=2.0, filter_p=1.0)
    assert same.processor is not None
    assert combined.processor is not None
    nucleus = dexperts.keep_nucleus(bare, 0.9)
    torch.testing.assert_close(same.processor([PROMPTS[0]])(ids, bare).detach(), nucleus)
    away = load_expert(lm, "a", ANTI_EXPERT)(ids).logits[:, -1].detach()
    torch.testing.assert_close(
        combined.processor([PROMPTS[0]])(ids, bare).detach(),
        bare + 2 * (towards - away),
        rtol=1e-4,
        atol=1e-4,
    )


def test_missing_parts_name_the_command(lm: Any, results: Path) -> None:
    with pytest.raises(InvalidFileError, match=r"python benchmarks/peers/run\.py"):
        dexperts.build(lm, word_tokenizer(), attribute="a", alpha=1.0)


@torch.inference_mode()
def test_a_control_vector_is_active_in_its_context(lm: Any, results: Path) -> None:
    if find_spec("repeng") is None:  # its import needs a workaround
        pytest.skip("needs benchmarks/peers/requirements-control-vectors.txt")
    from peers import control_vectors

    tokenizer = word_tokenizer(pad_token="<|endoftext|>")
    sides = Sides(TEXTS, [f"w{number % 9 + 40} w{number % 4 + 50}" for number in range(40)])
    control_vectors.train_vector(lm, tokenizer, sides, part("a", control_vectors.VECTOR))
    ids = torch.tensor([[0, 5, 6, 7]])
    bare = lm(ids).logits
    _, metadata = _io.read_tensors(part("a", control_vectors.VECTOR))
    likelihoods = {tuple(layers): one for layers, one in json.loads(metadata["likelihoods"])}
    assert set(likelihoods) == {(0, 1), (1, 1)}
    chosen = tuple(json.loads(metadata["layers"]))
    assert likelihoods[chosen] == max(likelihoods.values())
    plugin = control_vectors.build(lm, tokenizer, attribute="a", coefficient=2.0)
    with plugin.active():
        controlled = lm(ids).logits
    assert not torch.allclose(bare, controlled, atol=1e-3)
    assert torch.equal(lm(ids).logits, bare)


class TestMethodsOnTheHead:
    """LM-Steer, token biases and SASA, on the last hidden states of texts of two sides."""

    @pytest.fixture
    def reader(self, lm: Any) -> StateReader:
        return StateReader(lm, word_tokenizer(), Sides(TEXTS, OTHERS), 0)

    def test_states_are_those_before_every_token(self, lm: Any, reader: StateReader) -> None:
        states = reader.states
        assert len(states.tokens) == len(states.hidden) == 80 * 3
        assert (len(states.ends), int((~states.trained).sum())) == (80, 8 * 3)
        head = lm.get_output_embeddings()
        ids = torch.tensor([[0, *word_tokenizer()(OTHERS[0]).input_ids]])
        logits = lm(ids).logits[0, :-1]
        first = 40 * 3  # the first token of the other side
        torch.testing.assert_close(
            head(states.hidden[first : first + 3].float()), logits, rtol=1e-2, atol=1e-2
        )
        assert states.tokens[first : first + 3].tolist() == ids[0, 1:].tolist()
        assert states.signs[first - 1 : first + 1].tolist() == [1.0, -1.0]

    @pytest.mark.parametrize(
        ("file", "make"), [(MAP, lambda: LowRankMap(32, 4)), (BIAS, lambda: TokenBias(64))]
    )
    def test_a_fit_raises_the_likelihood_of_each_side(
        self, results: Path, reader: StateReader, file: str, make: Any
    ) -> None:
        settings = FitSettings(learning_rate=0.05, rows=32, epochs=4)
        fit_change(make, reader, part("a", file), settings)
        tensors, metadata = _io.read_tensors(part("a", file))
        change = make()
        change.load_state_dict(tensors)
        head = reader.lm.get_output_embeddings()
        gain = held_out_gain(change, head, reader.states)
        assert float(metadata["held-out gain"]) == pytest.approx(gain, abs=1e-4)
        assert gain > 0.3
        assert held_out_gain(change, head, reader.states, -1.0) < 0.0
        assert held_out_gain(change, head, reader.states, 0.0) == 0.0
        assert read_record(part("a", file))["texts"] == 80

    def test_an_interrupted_fit_continues(self, results: Path, reader: StateReader) -> None:
        settings = FitSettings(learning_rate=0.05, rows=16, checkpoint_steps=3)

        def interrupt(done: int, total: int) -> None:
            if done == 8:
                raise KeyboardInterrupt

        fit_change(lambda: LowRankMap(32, 4), reader, part("a", "whole"), settings)
        with pytest.raises(KeyboardInterrupt):
            fit_change(lambda: LowRankMap(32, 4), reader, part("a", "resumed"), settings, interrupt)
        steps: list[int] = []
        fit_change(
            lambda: LowRankMap(32, 4),
            reader,
            part("a", "resumed"),
            settings,
            lambda done, total: steps.append(done),
        )
        assert steps[0] == 7  # the checkpoint is that of step 6
        whole, resumed = (part("a", name).read_bytes() for name in ("whole", "resumed"))
        assert whole == resumed

    def test_lm_steer_changes_the_head_while_it_is_active(self, lm: Any, results: Path) -> None:
        down, up = torch.randn(32, 4), torch.randn(4, 32)
        _io.write_tensors(part("a", MAP), {"down": down, "up": up}, {})
        ids = torch.tensor([[0, 5, 6, 7]])
        output = lm(ids, output_hidden_states=True)
        nothing, steered = (
            lm_steer.build(lm, word_tokenizer(), attribute="a", epsilon=epsilon)
            for epsilon in (0.0, 0.5)
        )
        with nothing.active():
            assert torch.equal(lm(ids).logits, output.logits)
        with steered.active():
            logits = lm(ids).logits
        # The paper's formula: (e_v + epsilon W e_v) . h with W^T = down up.
        embeddings = lm.get_output_embeddings().weight
        changed = embeddings + 0.5 * embeddings @ (down @ up).T
        torch.testing.assert_close(
            logits, output.hidden_states[-1] @ changed.T, rtol=1e-3, atol=1e-3
        )
        assert torch.equal(lm(ids).logits, output.logits)

    def test_a_token_bias_is_added(self, lm: Any, results: Path) -> None:
        bias = torch.randn(64)
        _io.write_tensors(part("a", BIAS), {"bias": bias}, {})
        plugin = token_bias.build(lm, word_tokenizer(), attribute="a", epsilon=2.0)
        assert plugin.processor is not None
        logits = torch.randn(2, 64)
        changed = plugin.processor(PROMPTS)(torch.zeros(2, 4), logits)
        assert torch.equal(changed, logits + 2 * bias)

    @torch.inference_mode()
    def test_sasa_adds_the_margins_of_candidates(
        self, lm: Any, results: Path, reader: StateReader
    ) -> None:
        sasa.fit_subspace(reader, part("a", sasa.SUBSPACE))
        tensors, _ = _io.read_tensors(part("a", sasa.SUBSPACE))

        def processor(beta: float) -> Any:
            plugin = sasa.build(
                lm, word_tokenizer(), attribute="a", beta=beta, candidates=6, filter_p=0.8
            )
            assert plugin.processor is not None
            return plugin.processor(PROMPTS)

        rows = torch.tensor([[0, 5, 6, 7]] * 2 + [[0, 0, 0, 9]] * 2)  # padded on the left
        nothing, steer = processor(0.0), processor(0.7)
        for step in range(3):
            texts = [
                [*prompt, *rows[row, 4:].tolist()]
                for row, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(2))
            ]
            logits = torch.stack([lm(torch.tensor([text])).logits[0, -1] for text in texts])
            assert torch.equal(nothing(rows, logits), logits)
            added = steer(rows, logits) - logits
            top, tokens, inside = sasa.nucleus_top(logits, 6, 0.8)
            for row, text in enumerate(texts):
                chosen = tokens[row][inside[row]]
                ends = torch.stack(
                    [
                        lm.base_model(torch.tensor([[*text, token]])).last_hidden_state[0, -1]
                        for token in chosen.tolist()
                    ]
                )
                margins = ends @ tensors["normal"] + tensors["offset"]
                mean = top[row][inside[row]].softmax(0) @ margins
                expected = torch.zeros(64)
                expected[chosen] = 0.7 * (margins - mean)
                torch.testing.assert_close(added[row], expected, rtol=1e-3, atol=1e-3)
            rows = torch.cat([rows, torch.tensor([[1 + step], [2], [3], [4]])], 1)

    def test_the_classifier_is_bayes_optimal(self) -> None:
        generator = torch.Generator().manual_seed(0)
        signs = torch.ones(4000)
        signs[2000:] = -1.0
        mixing = torch.tensor([[1.0, 0.0], [0.8, 0.5]])
        states = torch.randn(4000, 2, generator=generator) @ mixing.T
        states[:2000] += torch.tensor([0.5, 1.0])
        normal, offset = sasa.linear_classifier(states, signs)
        expected = torch.linalg.solve(mixing @ mixing.T, torch.tensor([0.5, 1.0]))
        assert float((states @ normal + offset).std()) == pytest.approx(1.0, abs=1e-3)
        cosine = torch.nn.functional.cosine_similarity(normal, expected, dim=0)
        assert float(cosine) > 0.99
        centre = torch.tensor([0.25, 0.5])
        assert float(normal @ centre + offset) == pytest.approx(0.0, abs=0.1)
