"""Goals with a marker and a window in transformers: all tokens before the marker are as bare."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import LogitsProcessor

import foretrace as ft
from foretrace.attribute import Attribute
from foretrace.engines.token_bytes import TokenBytes
from foretrace.engines.transformers import SteeringProcessor, generate_tokens
from foretrace.engines.transformers.explain import explain
from foretrace.engines.transformers.sampler import Sampler
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal, Compiler, Goal, Marker
from goals import compiled
from tiny_lm import byte_tokenizer, tiny_hmm, tiny_model

NEW, PROMPTS = 24, [[50, 60, 70], [80], [90, 40]]
TOKENIZER = byte_tokenizer(["It was the best of times, it was the worst of times."], 300)
MARKED = list(range(100, 130))  # tokens that the marker is made of


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny_model(TOKENIZER)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    hmm = tiny_hmm(TOKENIZER)
    config = replace(hmm.config, tokenizer_fingerprint=None)
    return Compiler(HMM(hmm.initial, hmm.transition, hmm.emission, config))


@pytest.fixture(scope="module")
def attribute() -> Attribute:
    weights = torch.rand(len(TOKENIZER), generator=torch.Generator().manual_seed(0))
    return Attribute.from_weights(weights)


@pytest.fixture(scope="module")
def marker() -> Marker:
    """A marker that thirty tokens spell, so that a random LM writes it soon."""
    spelled = [b"!" if token in MARKED else b"." for token in range(len(TOKENIZER))]
    return Marker("!", spelled)


class Recorder(LogitsProcessor):
    """Keeps the logits of every step."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.clone())
        return scores


def write(
    lm: Any, goal: CompiledGoal | None, **options: Any
) -> tuple[list[list[int]], list[Tensor]]:
    """Generate with a seed; return the tokens, and the logits of every step."""
    recorder = Recorder()
    torch.manual_seed(0)
    settings = {"eos_token_id": None, "logits_processor": [recorder]} | options
    rows = generate_tokens(lm, TOKENIZER, PROMPTS, goal=goal, max_new_tokens=NEW, **settings)
    return rows, recorder.logits


def first_after(row: list[int]) -> int:
    """Return the position after the first token of the marker."""
    return next((i + 1 for i, token in enumerate(row) if token in MARKED), len(row))


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}])
def test_everything_before_the_marker_is_as_bare(
    lm: Any, compiler: Compiler, attribute: Attribute, marker: Marker, options: dict[str, Any]
) -> None:
    """Rows reach the marker at different steps; until then tokens and logits are the same bits."""
    bare, bare_logits = write(lm, None, **options)
    steered, logits = write(lm, compiler.compile(Goal(attribute, 20.0, after=marker)), **options)
    begins = [first_after(row) for row in bare]
    assert len(set(begins)) > 1
    assert min(begins) < NEW
    for row, begin in enumerate(begins):
        assert steered[row][:begin] == bare[row][:begin]
        for step in range(begin):
            assert torch.equal(logits[step][row], bare_logits[step][row])
        if begin < NEW:
            assert not torch.equal(logits[begin][row], bare_logits[begin][row])


def test_after_the_window_logits_are_those_of_the_lm(
    lm: Any, compiler: Compiler, attribute: Attribute, marker: Marker
) -> None:
    goal = Goal(attribute, 20.0, after=marker, window=3)
    rows, logits = write(lm, compiler.compile(goal), do_sample=False)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, rows, strict=True)):
        choices = explain(lm, prompt, tokens, [goal], compiler, max_new_tokens=NEW)
        begin = first_after(tokens)
        steered = [begin <= step < begin + 3 for step in range(NEW)]
        assert [choice.price > 1e-9 for choice in choices] == steered
        for step, choice in enumerate(choices):
            assert choice.written.token == int(logits[step][row].argmax())
            assert steered[step] or choice.written.eap == (1.0,)


def test_beams_and_samples_keep_their_windows(
    lm: Any,
    compiler: Compiler,
    attribute: Attribute,
    marker: Marker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the states were computed from all tokens in every step."""
    goal = compiler.compile(Goal(attribute, 20.0, after=marker, window=6))
    ways: list[dict[str, Any]] = [
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 2},
    ]
    cached = [write(lm, goal, **options)[0] for options in ways]
    original = SteeringProcessor.__call__

    def forgetful(self: SteeringProcessor, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.tracker is not None:
            self.tracker._slots.clear()
        return original(self, input_ids, scores)

    monkeypatch.setattr(SteeringProcessor, "__call__", forgetful)
    assert [write(lm, goal, **options)[0] for options in ways] == cached
    assert cached != [write(lm, None, **options)[0] for options in ways]


def test_the_sampler_and_observers_see_no_price_before_the_marker(
    lm: Any, compiler: Compiler, attribute: Attribute, marker: Marker
) -> None:
    never = Marker("!!!", marker.token_bytes)
    sampler = Sampler(lm, ends=[], max_new_tokens=2)
    drawn = sampler.draw(PROMPTS, 2, compiler.compile(Goal(attribute, 20.0, after=never)))
    assert all(one.price == 0.0 for row in drawn for one in row)
    prices: list[Tensor] = []
    processor = SteeringProcessor(
        compiler.compile(Goal(attribute, 20.0, after=marker)),
        prompt_mask=torch.ones(2, 1),
        max_new_tokens=NEW,
        on_price=prices.append,
    )
    for ids in ([[40], [40]], [[40, 41], [40, MARKED[0]]]):
        processor(torch.tensor(ids), torch.zeros(2, len(TOKENIZER)))
    assert [[price > 0 for price in step.tolist()] for step in prices] == [
        [False, False],
        [False, True],
    ]


def test_a_whole_answer_in_one_call(lm: Any, compiler: Compiler, attribute: Attribute) -> None:
    """With a real marker, in the prompt: a chat template may close an empty block of thoughts."""
    marker = ft.marker("</t>", TOKENIZER)
    goal = compiler.compile(ft.Goal(attribute, 20.0, after=marker, window=4))
    texts = []
    for one in (None, goal):
        torch.manual_seed(0)
        texts += ft.generate(
            lm, TOKENIZER, ["It was</t>\n\n", "It was"], goal=one, max_new_tokens=4, do_sample=False
        )
    assert texts[0] != texts[2]
    assert texts[1] == texts[3]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}])
def test_a_real_lm_reasons_as_bare(smollm2: Path, options: dict[str, Any]) -> None:
    """Up to a marker that it writes; `<|im_end|>` is a special token that it may go on after."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    hmm = HMM.from_pretrained(Path(__file__).parents[3] / "examples" / "smollm2-135m")
    weights = torch.rand(hmm.vocab_size, generator=torch.Generator().manual_seed(0))
    attribute = Attribute.from_weights(weights)
    token_bytes = TokenBytes.of(tokenizer)
    chat = [{"role": "user", "content": "Name a colour."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt).input_ids
    settings: dict[str, Any] = {"max_new_tokens": 32, "eos_token_id": None, **options}

    def written(goal: CompiledGoal | None) -> list[int]:
        torch.manual_seed(1)
        return generate_tokens(model, tokenizer, [ids], goal=goal, **settings)[0]

    bare = written(None)
    begins = {}
    for text in (".", "<|im_end|>"):
        goal = compiled(hmm, attribute, 64, 8.0, after=token_bytes.marker(text), window=16)
        span = goal.window.span(ids, bare)
        if span is not None and (begin := span.start) < len(bare):
            begins[text] = begin
            steered = written(goal)
            assert steered[:begin] == bare[:begin]
            assert steered != bare
    assert begins
    assert options["do_sample"] or "<|im_end|>" in begins
