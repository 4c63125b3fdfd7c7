"""Steering a real LM: the traps that published codes fall into, and what sparseness costs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import AutoModelForCausalLM, AutoTokenizer

from foretrace.attribute import Attribute
from foretrace.engines.token_bytes import contains
from foretrace.engines.transformers import Goals, encode_prompts, generate_tokens
from foretrace.hmm import HMM
from foretrace.steering import Compiler, Goal, Request
from goals import plain_goal, steer

ROOT = Path(__file__).parents[3]
PROMPTS = ["The weather in Paris", "She opened the door and", "My"]
NEW, TOLERANCE = 12, 1e-3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lm(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.from_pretrained(ROOT / "examples" / "smollm2-135m")


@pytest.fixture(scope="module")
def attribute(hmm: HMM) -> Attribute:
    """A random one of 5,000 tokens; the commonest words are among them."""
    random = torch.Generator().manual_seed(0)
    weights = torch.ones(hmm.vocab_size)
    weights[torch.randperm(hmm.vocab_size, generator=random)[:5000]] = 0.2
    weights[200:400] = torch.rand(200, generator=random)
    return Attribute.from_weights(weights)


def write(lm: Any, tokenizer: Any, prompts: list[str], goals: Goals, **options: Any) -> Any:
    encoded = encode_prompts(tokenizer, prompts)
    settings = {"do_sample": False, "max_new_tokens": NEW} | options
    return generate_tokens(lm, tokenizer, encoded, goal=goals, **settings)


def test_a_batch_equals_its_rows(lm: Any, tokenizer: Any, hmm: HMM, attribute: Attribute) -> None:
    """Padded on the left, with goals of their own or none; a second call; past the horizon."""
    both = [Goal(~attribute), Goal(attribute, 1.0)]
    own = [plain_goal(hmm, attribute, 4, 3.0), Compiler(hmm).compile(both), None]
    together = write(lm, tokenizer, PROMPTS, own)
    assert together == write(lm, tokenizer, PROMPTS, own)
    for prompt, goal, row in zip(PROMPTS, own, together, strict=True):
        assert [row] == write(lm, tokenizer, [prompt], goal)
    bare = write(lm, tokenizer, PROMPTS, None)
    assert together[2] == bare[2]
    assert together[0] != bare[0]
    assert together[1] != bare[1]


@pytest.mark.shows("transformers generate", "beams")
def test_beams_keep_their_states(lm: Any, tokenizer: Any, hmm: HMM) -> None:
    """Of the words of even numbers none is written, whichever beam they are on."""
    odd = (torch.arange(hmm.vocab_size) % 2).float()
    goal = plain_goal(hmm, Attribute.from_weights(odd), 64)
    rows = write(lm, tokenizer, PROMPTS, goal, num_beams=3, num_return_sequences=2)
    assert len(rows) == 2 * len(PROMPTS)
    assert all(token % 2 == 1 or token == 0 for row in rows for token in row)


def test_sparse_is_within_its_promise_of_dense(
    lm: Any, tokenizer: Any, hmm: HMM, attribute: Attribute
) -> None:
    """After 200 beginnings of real sentences, from this project's documentation."""
    texts = (Path(__file__).parents[1] / "beginnings.txt").read_text("utf-8").splitlines()
    assert len(texts) == 200
    prompts = encode_prompts(tokenizer, texts)
    logits = _next_token_logits(lm, prompts)
    whole = hmm.emission.of_tokens(torch.arange(hmm.vocab_size))
    dense = HMM(hmm.initial, hmm.transition, whole / whole.sum(0), hmm.config)
    sparse = dense.sparsify(TOLERANCE)
    steered = [_steered(each, attribute, prompts, logits) for each in (dense, sparse)]
    apart = (steered[0] - steered[1]).abs().sum(-1) / 2
    promised = (TOLERANCE / 2) ** 0.5  # by Pinsker, of each state's own distribution
    assert float(apart.mean()) < promised / 10
    assert float((apart > promised).double().mean()) <= 0.01
    moved = (steered[0] - logits.double().softmax(-1)).abs().sum(-1) / 2
    assert float(moved.mean()) > 10 * float(apart.mean())


def _next_token_logits(lm: Any, prompts: list[list[int]]) -> Tensor:
    """Compute the logits after each prompt; prompts of one length form a batch, without padding."""
    logits = torch.empty(len(prompts), lm.config.vocab_size)
    for length in {len(ids) for ids in prompts}:
        rows = [row for row, ids in enumerate(prompts) if len(ids) == length]
        with torch.inference_mode():
            batch = lm(torch.tensor([prompts[row] for row in rows]), logits_to_keep=1)
        logits[rows] = batch.logits[:, -1]
    return logits


def _steered(hmm: HMM, attribute: Attribute, prompts: list[list[int]], logits: Tensor) -> Tensor:
    goal = plain_goal(hmm, attribute, 64, scale=2.0)
    requests = [Request(goal, tuple(ids), 20) for ids in prompts]
    return steer(hmm, requests, [[]] * len(prompts), logits).double().softmax(-1)


@pytest.mark.shows("transformers generate", "constraints")
def test_what_must_occur_occurs_after_every_prompt(lm: Any, tokenizer: Any, hmm: HMM) -> None:
    """100 prompts: the one text is always there, within the length, and the others never."""
    must, must_not = "refund", [" the", "The"]
    attribute = contains(must, tokenizer) & ~contains(must_not, tokenizer)
    goal = plain_goal(hmm, attribute, 64)
    beginnings = (Path(__file__).parents[1] / "beginnings.txt").read_text().splitlines()
    prompts = [beginnings[place % len(beginnings)] for place in range(100)]
    torch.manual_seed(0)
    for start in range(0, len(prompts), 25):
        encoded = encode_prompts(tokenizer, prompts[start : start + 25])
        found = generate_tokens(lm, tokenizer, encoded, goal=goal, max_new_tokens=NEW, top_p=0.9)
        for written in found:
            text = tokenizer.decode(written, skip_special_tokens=True)
            assert must in text
            assert not any(each in text for each in must_not)
