"""Test the plug-ins of other methods on a tiny LM."""

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

from foretrace.errors import InvalidFileError
from foretrace.evaluate.suite import AttributePlan
from page_runner import PROJECT
from tiny_lm import tiny_model, word_tokenizer

sys.path.insert(0, str(PROJECT / "benchmarks"))

from peers import dexperts, fine_tuning, self_debiasing
from peers.experts import ANTI_EXPERT, EXPERT, load_expert
from peers.lora import FineTuning, LoraSettings, train_adapter
from peers.parts import part, read_record
from peers.second_model import SecondModel, insert_text
from peers.sides import Sides, read_sides

# peft 0.21 uses a name that transformers 5 has replaced.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

PROMPTS = [[0, 5, 6, 7], [0, 9]]
TEXTS = [f"w{number % 7} w{number % 5 + 20} w{number % 3 + 30}" for number in range(40)]
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


def test_sides_are_the_clearest_texts(tmp_path: Path) -> None:
    rows = [0.9, 0.5, 0.1, 0.6, 0.3]
    lines = [f'{{"text": "t{score}", "toxicity": {score}}}\n' for score in rows]
    (tmp_path / "scored.jsonl").write_text("".join(lines))
    plan = AttributePlan("scored.jsonl", score="toxicity", invert=True)
    assert read_sides(plan, tmp_path) == Sides(["t0.1", "t0.3"], ["t0.9", "t0.6"])
    assert read_sides(plan, tmp_path, most=1) == Sides(["t0.1"], ["t0.9"])


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

    tokenizer = word_tokenizer(
        pad_token="<|endoftext|>", model_input_names=["input_ids", "attention_mask"]
    )
    sides = Sides(TEXTS, [f"w{number % 9 + 40} w{number % 4 + 50}" for number in range(40)])
    control_vectors.train_vector(lm, tokenizer, sides, part("a", control_vectors.VECTOR))
    ids = torch.tensor([[0, 5, 6, 7]])
    bare = lm(ids).logits
    plugin = control_vectors.build(lm, tokenizer, attribute="a", coefficient=2.0, layers=[1, 1])
    with plugin.active():
        controlled = lm(ids).logits
    assert not torch.allclose(bare, controlled, atol=1e-3)
    assert torch.equal(lm(ids).logits, bare)
