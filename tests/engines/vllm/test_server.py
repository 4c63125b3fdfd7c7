"""Steering over HTTP: a real vLLM server, as anybody would run it."""

import json
import random
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")


import foretrace as ft
from foretrace.attribute import Attribute
from foretrace.attribute.expression import Contains
from foretrace.chat import as_messages
from foretrace.cli.playground.backends import PlaygroundRequest, ServerBackend
from foretrace.context import Probe
from foretrace.engines.transformers import generate_tokens
from foretrace.engines.vllm.params import parse
from foretrace.engines.vllm.settings import Settings
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering.markers import CompiledMarker
from random_attributes import write_random
from second_runner_process import run_second_runner
from server import ONE_PROCESS, RealServer, ask_all, completion, serving, steered
from tiny_lm import WORDS, chat_tokenizer, tiny_hmm, write_tiny_lm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's own are many

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2-135m"
BEGINNINGS = Path(__file__).parents[1] / "beginnings.txt"


def _attributes(folder: Path, vocab_size: int, count: int, known: str | None = None) -> list[str]:
    """Write attributes of random weights."""
    names = [f"a{place}" for place in range(count)]
    for place, name in enumerate(names):
        write_random(folder, name, vocab_size, share=0.5, known=known, seed=place)
    return names


def _tokens(answer: Any) -> list[int]:
    assert not isinstance(answer, Exception), answer
    return list(answer.choices[0].token_ids)


@pytest.fixture(scope="module")
def real(real_server: RealServer) -> tuple[str, Path]:
    """A server of a real LM, and the folder of its attributes."""
    return real_server.address, real_server.attributes


class TransformersEngine:
    """The other engine, with the same LM, HMM and attributes. Each goal's table is built once."""

    def __init__(self, model: Path, attributes: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.hmm = HMM.from_pretrained(EXAMPLE)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.probe = Probe.load(attributes.parent / "probe.safetensors")
        names = ("a0", "a1", "a2", "moody")
        self.loaded = {name: Attribute.load(attributes / f"{name}.safetensors") for name in names}
        self.goals: dict[str, ft.CompiledGoal | None] = {}

    def write(
        self, prompts: list[list[int]], asked: list[dict[str, Any] | None], length: int
    ) -> list[list[int]]:
        """Generate the tokens of each prompt."""
        return generate_tokens(
            self.model,
            self.tokenizer,
            prompts,
            goal=[self._goal(goal or {}) for goal in asked],
            max_new_tokens=length,
            do_sample=False,
            temperature=None,
            top_p=None,
        )

    def _goal(self, given: dict[str, Any]) -> ft.CompiledGoal | None:
        text = json.dumps(given)
        if text not in self.goals:
            self.goals[text] = self._build(given)
        return self.goals[text]

    def _build(self, given: dict[str, Any]) -> ft.CompiledGoal | None:
        asked = parse(given)
        if asked is None:
            return None
        horizon = 64 if asked.horizon is None else asked.horizon
        compiler = ft.Compiler(self.hmm, horizon, self.probe)
        assert not isinstance(asked.window, str)
        settings = {
            "neutral_end": asked.neutral_end,
            "after": None if asked.after is None else ft.marker(asked.after, self.tokenizer),
            "window": asked.window,
        }

        def contains(one: Contains) -> Attribute:
            return ft.contains(one.texts, self.tokenizer)

        return compiler.compile(
            [goal for text in asked.goals for goal in text.goals(self.loaded, contains, **settings)]
        )


@pytest.fixture(scope="module")
def other_engine(real: tuple[str, Path], smollm2: Path) -> TransformersEngine:
    return TransformersEngine(smollm2, real[1])


@pytest.mark.shows(
    "vLLM, runner V1", "greedy", "batch", "constraints", "several goals", "context rewards"
)
def test_it_writes_what_transformers_writes(
    real: tuple[str, Path], other_engine: TransformersEngine, smollm2: Path
) -> None:
    """Greedy, token for token, on 50 prompts, over goals of every kind, and none."""
    address, _ = real
    prompts, asked = _requests(smollm2, 50)
    requests = [
        completion(ids, goal, max_tokens=12) for ids, goal in zip(prompts, asked, strict=True)
    ]
    answers = [_tokens(answer) for answer in ask_all(address, requests, retries=20)]
    assert len(answers) == 50
    assert answers == other_engine.write(prompts, asked, 12)


@pytest.mark.shows(
    "vLLM, runner V2", "greedy", "batch", "constraints", "several goals", "context rewards"
)
def test_the_second_model_runner_writes_the_same(
    real: tuple[str, Path], other_engine: TransformersEngine, smollm2: Path
) -> None:
    """The default on GPUs: here through Triton's interpreter, on fewer slots than requests."""
    folder = real[1]
    prompts, asked = _requests(smollm2, 12)
    given = [
        {"prompt": ids, "goal": goal, "max_tokens": 6}
        for ids, goal in zip(prompts, asked, strict=True)
    ]
    tables, tokenizer = str(folder.parent / "tables"), str(smollm2)
    probe = str(folder.parent / "probe.safetensors")
    settings = Settings(str(EXAMPLE), str(folder), tables, tokenizer=tokenizer, probe=probe)
    answers = run_second_runner(smollm2, given, settings)["tokens"]
    assert answers == other_engine.write(prompts, asked, 6)


def _requests(model: Path, count: int) -> tuple[list[list[int]], list[dict[str, Any] | None]]:
    """Make prompts, and what each asks for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    goals: list[dict[str, Any] | None] = [
        {"goal": "a0", "strength": 3},
        {"goal": "a0 & ~a1", "transform": [2, -1]},
        {"goal": "a0 | a2", "neutral_end": 0},
        {"goal": ["a1", "a2"], "strength": [2, 0.5]},
        {"goal": ["a1", "~a2"], "transform": [2, 0, 0.5, 1]},
        {"goal": "a1", "strength": 1, "horizon": 3},
        {"goal": 'a0 & contains("refund") & ~contains(" a", "of")', "strength": 2},
        {"goal": "a2", "strength": 1, "must_contain": ["no", "yes"], "must_not_contain": "and"},
        {"must_not_contain": " the"},
        {"goal": "a1", "strength": 3, "after": " ", "window": 3},
        {"goal": "moody", "strength": 1},
        {"goal": "a1 & ~moody", "strength": 0.5, "must_not_contain": " the"},
        None,
    ]
    texts = BEGINNINGS.read_text("utf-8").splitlines()[:count]
    prompts = [[0, *tokenizer(text, add_special_tokens=False).input_ids] for text in texts]
    return prompts, [goals[place % len(goals)] for place in range(count)]


@pytest.mark.shows("vLLM, runner V1", "sampling")
def test_what_must_occur_occurs(real: tuple[str, Path]) -> None:
    """Sampled, after 100 prompts, beside others that ask for nothing; where it fits, or refused."""
    from openai import BadRequestError

    address, _ = real
    must = {"must_contain": "refund", "must_not_contain": [" the", "The"], "goal": "a0"}
    texts = BEGINNINGS.read_text("utf-8").splitlines()[:100]
    requests = []
    for seed, text in enumerate(texts):
        requests.append(completion(text, must, max_tokens=12) | {"temperature": 1, "seed": seed})
        if seed % 3 == 0:
            requests.append(completion(text, max_tokens=12))
    for request, answer in zip(requests, ask_all(address, requests), strict=True):
        assert not isinstance(answer, Exception), answer
        if "extra_body" in request and "vllm_xargs" in request["extra_body"]:
            assert "refund" in answer.choices[0].text
            assert " the" not in answer.choices[0].text
    short = completion("The", {"must_contain": "a most remarkable refund"}, max_tokens=2)
    (refused,) = ask_all(address, [short])
    assert isinstance(refused, BadRequestError)
    assert "tokens at least" in str(refused)


def test_biased_logits_are_solved_or_context_is_left_out(
    real: tuple[str, Path], other_engine: TransformersEngine
) -> None:
    """Biases of tokens that the probe reads, which no text contains."""
    address, goal = real[0], {"goal": "moody", "strength": 1}
    tokens = other_engine.probe.tokens.tolist()
    texts = BEGINNINGS.read_text("utf-8").splitlines()[:6]

    def write(given: dict[str, Any] | None, biased: int) -> list[list[int]]:
        bias = {str(token): -8.0 for token in tokens[:biased]}
        requests = [completion(text, given, max_tokens=8, logit_bias=bias) for text in texts]
        return [_tokens(answer) for answer in ask_all(address, requests, retries=20)]

    steered, before = write(goal, 0), _unreadable(address)
    assert steered != write(None, 0)
    assert write(goal, 20) == steered
    assert _unreadable(address) == before
    assert write(goal, 400) == write(None, 400)
    assert _unreadable(address) == before + 8 * len(texts)


def _unreadable(address: str) -> int:
    """Return how many tokens had no context reward."""
    with urllib.request.urlopen(f"{address}/metrics") as page:
        lines = page.read().decode().splitlines()
    values = [line.split()[-1] for line in lines if line.startswith("foretrace_unreadable_total")]
    return sum(int(float(value)) for value in values)


@pytest.mark.shows("vLLM, runner V1", "structured outputs")
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"choice": ["good", "bad"]}, "good|bad"),
        ({"regex": r"\{\"mark\": [1-5]\}"}, r"\{\"mark\": [1-5]\}"),
    ],
)
def test_a_grammar_and_a_goal_hold_together(
    real: tuple[str, Path], grammar: dict[str, Any], pattern: str
) -> None:
    requests = []
    for seed, goal in enumerate([{"goal": "a0", "level": "strong"}, {"goal": "a1 & ~a2"}, None]):
        request = completion("My opinion:", goal, max_tokens=16)
        request["extra_body"]["structured_outputs"] = grammar
        requests.append(request | {"temperature": 1, "seed": seed})
    for answer in ask_all(real[0], requests, retries=20):
        assert not isinstance(answer, Exception), answer
        assert re.fullmatch(pattern, answer.choices[0].text)


def test_plain_requests_are_untouched(real: tuple[str, Path], smollm2: Path) -> None:
    """Bit for bit what vLLM writes without foretrace: tokens and log-probabilities."""
    from vllm import LLM, SamplingParams

    address, _ = real
    bare = LLM(str(smollm2), dtype="float32", max_model_len=256, enforce_eager=True, seed=0)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    for words in BEGINNINGS.read_text("utf-8").splitlines()[:5]:
        (own,) = bare.generate([words], params, use_tqdm=False)
        (answer,) = ask_all(address, [completion(words, max_tokens=8, logprobs=1)])
        assert _tokens(answer) == list(own.outputs[0].token_ids)
        ours = answer.choices[0].logprobs.token_logprobs
        theirs = [
            step[token].logprob
            for step, token in zip(own.outputs[0].logprobs, own.outputs[0].token_ids, strict=True)
        ]
        assert ours == theirs


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_everything_before_a_marker_is_as_bare(
    real: tuple[str, Path], smollm2: Path, sampling: dict[str, Any]
) -> None:
    """Token for token, and bit for bit in the log-probabilities that vLLM reports."""
    from transformers import AutoTokenizer

    address, _ = real
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    changed = 0
    for words in BEGINNINGS.read_text("utf-8").splitlines()[:4]:
        request = completion(words, max_tokens=12, logprobs=1) | sampling
        (bare,) = ask_all(address, [request])
        marker = str(tokenizer.decode(_tokens(bare)[6]))
        goal = {"goal": "a0", "strength": 20, "after": marker}
        (answer,) = ask_all(
            address, [completion(words, goal, max_tokens=12, logprobs=1) | sampling]
        )
        prompt = tokenizer(words).input_ids  # one of them ends with its marker
        found = CompiledMarker.of(ft.marker(marker, tokenizer))
        at_once = found.marker.is_suffix_of(prompt)
        begin = 0 if at_once else found.end_of_first(_tokens(bare))
        assert begin is not None
        assert _tokens(answer)[:begin] == _tokens(bare)[:begin]
        steered_logprobs, bare_logprobs = (
            one.choices[0].logprobs.token_logprobs[:begin] for one in (answer, bare)
        )
        assert steered_logprobs == bare_logprobs
        changed += _tokens(answer) != _tokens(bare)
    assert changed > 1


def test_what_cannot_be_steered_toward_is_refused(real: tuple[str, Path]) -> None:
    from openai import BadRequestError

    address, folder = real
    (folder / "broken.safetensors").write_bytes(b"?")
    wrong = ["a00", "a0 &", "../a0", '"/etc/passwd"', "broken", "a" * 5000]
    answers = ask_all(address, [completion("w", {"goal": goal}, max_tokens=2) for goal in wrong])
    assert all(isinstance(answer, BadRequestError) for answer in answers)
    assert "Did you mean a" in str(answers[0])
    fine = ask_all(address, [completion("The", {"goal": "a0"}, max_tokens=2)])
    assert len(_tokens(fine[0])) == 2


def test_new_attributes_are_found_and_counted(real: tuple[str, Path]) -> None:
    address, folder = real
    attribute = Attribute.load(folder / "a0.safetensors")
    attribute.save(folder / "latest.safetensors")
    several = completion("One day", {"goal": "latest"}, max_tokens=4, n=3) | {"temperature": 1}
    (answer,) = ask_all(address, [several])
    assert len(answer.choices) == 3
    with urllib.request.urlopen(f"{address}/metrics") as page:
        metrics = page.read().decode()
    counted = dict(line.split() for line in metrics.splitlines() if line.startswith("foretrace_"))
    assert float(counted["foretrace_requests_total"]) >= 3
    assert float(counted["foretrace_step_seconds_count"]) > 0
    assert float(counted["foretrace_table_build_seconds_count"]) >= 1


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """A server of a tiny LM with 8 slots, and too little memory for 8 texts; names of goals.

    vLLM schedules and computes in one process, its default on one GPU. The server of the real LM
    has a process for each, vLLM's default on CPUs.
    """
    folder = tmp_path_factory.mktemp("crowded")
    hmm = tiny_hmm(chat_tokenizer(), states=16)
    hmm.save_pretrained(folder / "hmm")
    names = _attributes(folder / "attributes", len(WORDS), 20, hmm.config.tokenizer_fingerprint)
    few = ["--max-num-seqs", 8, "--block-size", 32, "--num-gpu-blocks-override", 8]
    few += ["--max-model-len", 64]
    # vLLM knows no heads of 16 on CPUs.
    lm = write_tiny_lm(folder / "lm", chat_tokenizer(), heads=1)
    command = steered(lm, folder / "hmm", folder / "attributes", *few)
    with serving(command, folder / "log", environment=ONE_PROCESS) as address:
        yield address, names


def _mixed_goals(names: list[str]) -> list[dict[str, Any]]:
    """Combine every form of goal with every setting, twice, over all attributes."""
    settings: list[dict[str, Any]] = [{"level": "mild"}, {"strength": 1}, {"transform": [5, -2]}]
    forms = ["{0}", "~{0}", "{0} & {1}", "{0} | ~{1}"]
    pairs = zip(names * 2, names[7:] + names, strict=False)
    combinations = product(forms * 2, settings)
    return [
        {"goal": form.format(*pair), **setting}
        for (form, setting), pair in zip(combinations, pairs, strict=False)
    ]


def test_nothing_leaks_between_requests(crowded: tuple[str, list[str]]) -> None:
    """500 at once, over 24 goals and 8 slots, some preempted: as if each were alone."""
    address, names = crowded
    goals = _mixed_goals(names)
    assert len(goals) == 24
    # Once the tables are built, no request waits for one: all 500 compete for the slots.
    ask_all(address, [completion([1], goal, max_tokens=1) for goal in goals], retries=20)
    numbers = random.Random(0)
    requests = []
    for _ in range(500):
        prompt = [numbers.randrange(1, len(WORDS)) for _ in range(numbers.randrange(1, 24))]
        goal = numbers.choice(goals) if numbers.random() < 0.8 else None
        requests.append(completion(prompt, goal, max_tokens=numbers.randrange(8, 24)))
    together = [_tokens(answer) for answer in ask_all(address, requests, retries=20)]
    with urllib.request.urlopen(f"{address}/metrics") as page:
        lines = page.read().decode().splitlines()
    preempted = [line for line in lines if line.startswith("vllm:num_preemptions_total")]
    assert float(preempted[0].split()[-1]) > 0
    some = slice(None, None, 3)  # one after the other they take long
    alone = [_tokens(answer) for answer in ask_all(address, requests[some], concurrency=1)]
    assert together[some] == alone


@pytest.mark.shows("vLLM, runner V1", "chats", "streaming")
def test_the_playground_asks_a_server(crowded: tuple[str, list[str]], tmp_path: Path) -> None:
    address, names = crowded
    backend = ServerBackend(address, tmp_path)
    request = PlaygroundRequest(
        "w1 w2", f"{names[0]} & {names[1]}", strength=3, max_new_tokens=8, seed=1
    )
    for steer in (False, True):
        heard: list[str] = []
        result = backend.generate(request, steer, heard.append)
        assert result.text.strip()
        assert heard[-1] == result.text
        assert backend.generate(request, steer, lambda _: None).text == result.text
    with pytest.raises(InvalidInputError, match=r"The server says: .*no attribute"):
        backend.generate(PlaygroundRequest("w1", "nobody"), True, lambda _: None)
    assert backend.can_chat()
    chat = replace(request, prompt=[*as_messages("w1"), {"role": "assistant", "content": "w2"}])
    chat = replace(chat, prompt=[*chat.prompt, *as_messages("w3")])
    answers = [backend.generate(chat, steer, lambda _: None).text for steer in (False, True)]
    assert answers[0] != answers[1]
    assert all(answer.strip() for answer in answers)
    assert not ServerBackend("http://127.0.0.1:9", tmp_path).can_chat()
    with pytest.raises(InvalidInputError, match="No server answers"):
        ServerBackend("http://127.0.0.1:9", tmp_path).generate(request, True, lambda _: None)
