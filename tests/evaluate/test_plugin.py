"""Test methods from outside foretrace: processors, hooks and models, their prices, and resuming."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("yaml", reason="needs the extra `evaluate`")

from foretrace.engines.transformers.sampler import Sampler
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.evaluate import Plugin
from foretrace.evaluate.plugin import load_plugin
from foretrace.evaluate.run import EvaluationConfig, evaluate
from foretrace.evaluate.suite import load_suite
from tiny_lm import tiny_hmm, word_tokenizer

SUITE = """
prompts: {file: prompts.jsonl, text: prompt}
continuations: 3
max_new_tokens: 5
methods:
  bare: {}
  nothing: {plugin: "outside:add", options: {token: 5, amount: 0}}
  processor: {plugin: "outside:add", options: {token: 5, amount: AMOUNT}, curve: add}
  prompted: {plugin: "outside:add", options: {token: 5, amount: 3}, instruction: "w1 {prompt}"}
  one token: {plugin: "outside:greedy", options: {token: 5, amount: 0}}
  hook: {plugin: "outside:shift", options: {token: 5, amount: 20}}
  model: {plugin: "outside:other", options: {token: 6, amount: 20}}
judges:
  five: {figures: [mean], source: "outside:has_five"}
"""
FIVE, SIX = "w4", "w5"  # the words of the tokens 5 and 6


def add(lm: Any, tokenizer: Any, *, token: int, amount: float) -> Plugin:
    """Add to the logits of a token."""

    def processor(prompts: Any) -> Any:
        def change(ids: Tensor, logits: Tensor) -> Tensor:
            assert len(logits) % len(prompts) == 0
            changed = logits.clone()
            changed[:, token] += amount
            return changed

        return change

    return Plugin(processor=processor)


def greedy(lm: Any, tokenizer: Any, *, token: int, amount: float) -> Plugin:
    """The same, of a nucleus of one token."""
    return replace(add(lm, tokenizer, token=token, amount=amount), top_p=1e-6)


def shift(lm: Any, tokenizer: Any, *, token: int, amount: float) -> Plugin:
    """Add to the output of the LM's last layer while a batch is generated."""

    @contextmanager
    def active() -> Iterator[None]:
        handle = lm.lm_head.register_forward_hook(
            lambda module, inputs, output: output.index_add(
                -1, torch.tensor([token]), torch.full_like(output[..., :1], amount)
            )
        )
        yield
        handle.remove()

    return Plugin(hook=active)


def other(lm: Any, tokenizer: Any, *, token: int, amount: float) -> Plugin:
    """Generate with a copy of the LM that prefers a token."""
    from copy import deepcopy

    model = deepcopy(lm)
    model.lm_head.register_forward_hook(
        lambda module, inputs, output: output.index_add(
            -1, torch.tensor([token]), torch.full_like(output[..., :1], amount)
        )
    )
    return Plugin(model=model)


def pair(lm: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return something else than a plug-in."""
    return lm, tokenizer


def has_five(texts: list[str]) -> list[float]:
    """Return the share of a word."""
    return [text.split().count(FIVE) / max(1, len(text.split())) for text in texts]


@pytest.fixture(scope="module", autouse=True)
def outside() -> Iterator[None]:
    """Let this module be found under the name that the suite has."""
    import sys

    sys.modules["outside"] = sys.modules[__name__]
    yield
    del sys.modules["outside"]


@pytest.fixture(scope="module")
def lm(tiny_lm: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)


def run(folder: Path, lm: Any, amount: float = 3.0) -> dict[str, Any]:
    rows = "".join(f'{{"prompt": "w{number} w2"}}\n' for number in range(4))
    (folder / "prompts.jsonl").write_text(rows)
    (folder / "mine.yaml").write_text(SUITE.replace("AMOUNT", str(amount)))
    config = EvaluationConfig(folder, folder / "out", rows=6)
    suite = load_suite(folder / "mine.yaml")
    return evaluate(suite, lm, word_tokenizer(), tiny_hmm(word_tokenizer()), config)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, lm: Any) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plugins")
    return folder, run(folder, lm)


def test_every_kind_changes_the_texts(done: tuple[Path, dict[str, Any]]) -> None:
    figures = {name: method["figures"] for name, method in done[1]["methods"].items()}
    scores = {name: figure["five, mean"]["value"] for name, figure in figures.items()}
    assert scores["nothing"] == scores["bare"]
    assert scores["processor"] > scores["bare"] + 0.1
    assert scores["hook"] == pytest.approx(1.0)
    assert scores["model"] == 0.0
    model_texts = (done[0] / "out" / "generations" / "model.jsonl").read_text()
    assert f"{SIX} {SIX}" in model_texts


def test_a_plugin_may_have_its_own_nucleus(done: tuple[Path, dict[str, Any]]) -> None:
    for name, certain in (("one token", True), ("nothing", False)):
        entropy = done[1]["methods"][name]["figures"]["entropy"]["value"]
        assert (abs(entropy) < 1e-3) == certain


def test_only_processors_have_a_price(done: tuple[Path, dict[str, Any]]) -> None:
    methods = done[1]["methods"]
    priced = {name for name, method in methods.items() if "price" in method["figures"]}
    assert priced == {"bare", "nothing", "processor"}
    assert methods["nothing"]["figures"]["price"]["value"] == pytest.approx(0.0, abs=1e-6)
    assert methods["processor"]["figures"]["price"]["value"] > 0.05


def test_losses_are_known_where_the_lm_itself_continued_the_prompt(
    done: tuple[Path, dict[str, Any]],
) -> None:
    known = {}
    for file in (done[0] / "out" / "generations").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        known[file.stem] = all(losses is not None for row in rows for losses in row["bare_nats"])
        assert known[file.stem] or all(row["bare_nats"] == [None] * 3 for row in rows)
    assert {name for name, is_known in known.items() if is_known} == {
        "bare",
        "nothing",
        "one token",
        "processor",
    }


HOOKED = """
prompts: {file: prompts.jsonl, text: prompt}
continuations: 12
max_new_tokens: 5
attributes:
  five: {file: scored.jsonl, score: score, uses_lm: false}
methods:
  bare: {}
  hook: {plugin: "outside:shift", options: {token: 5, amount: 3}}
  hook + goal: {plugin: "outside:shift", options: {token: 5, amount: 3}, goals: five, strength: 3}
  processor + goal: {plugin: "outside:add", options: {token: 5, amount: 3}, goals: five}
judges:
  five: {figures: [mean], source: "outside:has_five"}
"""


def run_hooked(folder: Path, lm: Any, *methods: str) -> dict[str, Any]:
    prompts = "".join(f'{{"prompt": "w{number} w2"}}\n' for number in range(4))
    scored = [f'{{"text": "{FIVE} w{n % 9} w{n % 7}", "score": 1}}\n' for n in range(40)]
    scored += [f'{{"text": "w{n % 9 + 9} w{n % 7 + 9}", "score": 0}}\n' for n in range(40)]
    for name, content in (
        ("prompts.jsonl", prompts),
        ("scored.jsonl", "".join(scored)),
        ("hooked.yaml", HOOKED),
    ):
        (folder / name).write_text(content)
    config = EvaluationConfig(folder, folder / "out", methods=methods, rows=6)
    suite = load_suite(folder / "hooked.yaml")
    return evaluate(suite, lm, word_tokenizer(), tiny_hmm(word_tokenizer()), config)


def test_a_hook_and_a_goal_act_together(tmp_path: Path, lm: Any) -> None:
    methods = run_hooked(tmp_path, lm, "hook", "hook + goal")["methods"]
    scores = {name: one["figures"]["five, mean"]["value"] for name, one in methods.items()}
    assert scores["bare"] < scores["hook"] < scores["hook + goal"]
    assert "price" not in methods["hook + goal"]["figures"]


def test_a_processor_excludes_goals(tmp_path: Path, lm: Any) -> None:
    with pytest.raises(InvalidInputError, match="outside:add has a logits processor"):
        run_hooked(tmp_path, lm, "processor + goal")


def test_a_finished_run_generates_nothing(
    done: tuple[Path, dict[str, Any]], lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Sampler, "draw")
    assert run(done[0], lm) == done[1]


def test_texts_of_other_options_are_refused(done: tuple[Path, dict[str, Any]], lm: Any) -> None:
    with pytest.raises(InvalidFileError, match=r"processor\.jsonl holds .* other settings"):
        run(done[0], lm, amount=4.0)


def test_texts_of_another_identity_are_refused(
    done: tuple[Path, dict[str, Any]], lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    before = add  # the name will stand for the other function

    def retrained(lm: Any, tokenizer: Any, **options: Any) -> Plugin:
        return replace(before(lm, tokenizer, **options), identity="other weights")

    monkeypatch.setattr(sys.modules["outside"], "add", retrained)
    with pytest.raises(InvalidFileError, match="other settings"):
        run(done[0], lm)


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("outside", {}, "Write module:function"),
        ("outside:absent", {}, "outside:absent cannot be imported"),
        ("no_such_module:add", {}, "cannot be imported"),
        ("outside:add", {"tokens": 1}, "unexpected keyword argument 'tokens'"),
        ("outside:has_five", {}, "cannot be called"),
        ("outside:pair", {}, r"returned tuple.*foretrace\.evaluate\.Plugin"),
    ],
)
def test_errors_name_the_cause(
    lm: Any, source: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        load_plugin(source, options, lm, word_tokenizer())
