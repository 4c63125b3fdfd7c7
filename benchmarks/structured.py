"""Structured outputs and a goal in one request, over HTTP: valid JSON whose text is steered.

Needs an environment with vLLM. Serves SmolLM2 with the HMM and the attributes of `examples/`, and
asks for reviews in a JSON schema, as chats with `response_format`. The same requests with the same
seeds are sent without a goal, and at two levels. FORETRACE_DATA names the folder of data, from
which a judge of n-grams is trained. It scores the free text. --quick sends fewer requests.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from jsonschema import ValidationError, validate

from foretrace.evaluate.linear_judge import LinearJudge
from foretrace.evaluate.metrics import Measurement, interval
from foretrace.evaluate.scoring import train_judge
from foretrace.evaluate.suite import load_suite
from harness import Report, options
from server import API_KEY, ONE_PROCESS, serving, steered
from smollm2 import find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
REQUESTS, QUICK_REQUESTS, CONCURRENCY, MAX_TOKENS = 100, 8, 32, 1800
WITHOUT_WHITESPACE = '{"backend": "xgrammar", "disable_any_whitespace": true}'
GOAL, LEVELS = "positive", ("medium", "strong")
KINDS = ("film", "restaurant", "book", "hotel", "phone", "concert", "museum", "video game", "car")
ADJECTIVES = ("new", "famous", "old", "small", "foreign", "cheap", "well-known", "local", "quiet")
PROPERTIES: dict[str, Any] = {
    "title": {"type": "string", "minLength": 5, "maxLength": 40},
    "review": {"type": "string", "minLength": 60, "maxLength": 200},
    "audience": {"enum": ["children", "adults", "everybody"]},
    "price": {"type": "integer", "minimum": 1, "maximum": 999},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}


class Answer(NamedTuple):
    """The text of an answer, and why it ended."""

    text: str
    finish_reason: str

    def parsed(self) -> dict[str, Any] | None:
        """Return the object if it is complete and satisfies the schema."""
        try:
            document: dict[str, Any] = json.loads(self.text)
            validate(document, SCHEMA)
        except (ValueError, ValidationError):
            return None
        return document


def main() -> None:
    """Compare answers without a goal with answers at every level."""
    args = options(__doc__)
    report = Report("Structured outputs and a goal in one request, over HTTP")
    judge = _judge()
    count = QUICK_REQUESTS if args.quick else REQUESTS
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = steered(find_smollm2(), EXAMPLES / "smollm2-135m", EXAMPLES / "attributes")
        command += ["--tables", folder / "tables", "--max-model-len", 2048]
        command += ["--structured-outputs-config", WITHOUT_WHITESPACE]
        with serving(command, folder / "log", environment=ONE_PROCESS) as address:
            bare = _ask_all(address, count, None)
            scores = _add(report, "bare", bare, judge)
            for level in LEVELS:
                name = f"{GOAL}, {level}"
                answers = _ask_all(address, count, {"goal": GOAL, "level": level})
                _add(report, name, answers, judge, scores)
            refusal = _ask_all(address, 1, {"must_contain": "museum"})[0]
            report.add("with must_contain: HTTP status", float(refusal.finish_reason), "")
    report.publish(args.json)


def _judge() -> LinearJudge:
    """Train a judge of n-grams on the texts that the suite `sentiment` trains its judge on."""
    data = Path(os.environ["FORETRACE_DATA"])
    plan = load_suite("sentiment").judges["positive"]
    assert plan.train is not None
    assert plan.label is not None
    return train_judge(plan.train.rows(data), plan.train, plan.label, None)


def _add(
    report: Report,
    name: str,
    answers: Sequence[Answer],
    judge: LinearJudge,
    bare: Sequence[float] = (),
) -> list[float]:
    """Report valid answers and the judge's mean score of their free text; return the scores."""
    parsed = [answer.parsed() for answer in answers]
    valid = sum(document is not None for document in parsed)
    report.add(f"{name}: valid", valid, f"of {len(answers)}", at_least=len(answers))
    stuck = sum(answer.finish_reason != "stop" for answer in answers)
    report.add(f"{name}: ended by the length limit or an error", stuck, "", at_most=0)
    texts = [str(document["review"]) if document else "" for document in parsed]
    report.add(f"{name}: characters of free text", float(np.mean([*map(len, texts)])), "")
    different = len(set(texts)) / len(texts)
    report.add(f"{name}: share of different texts", different, "")
    positive = judge.config.classes.index("1")
    scores: list[float] = judge.probabilities(texts)[:, positive].tolist()
    _add_mean(report, f"{name}: judge's mean", scores)
    if bare:
        pairs = zip(scores, bare, strict=True)
        _add_mean(report, f"{name}: change of the judge's mean", [one - two for one, two in pairs])
    return scores


def _add_mean(report: Report, name: str, values: Sequence[float]) -> None:
    value, *bounds = interval(Measurement(np.array(values), np.ones(len(values))))
    report.add(name, value, "", interval=bounds)


def _ask_all(address: str, count: int, goal: dict[str, str] | None) -> list[Answer]:
    return asyncio.run(_ask_concurrently(address, count, goal))


async def _ask_concurrently(address: str, count: int, goal: dict[str, str] | None) -> list[Answer]:
    from openai import APIStatusError, AsyncOpenAI

    schema = {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA}}
    semaphore = asyncio.Semaphore(CONCURRENCY)
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key=API_KEY, timeout=600) as client:

        async def ask(index: int) -> Answer:
            async with semaphore:
                try:
                    completion: Any = await client.chat.completions.create(
                        model="lm",
                        messages=[{"role": "user", "content": _question(index)}],
                        response_format=schema,
                        seed=index,
                        temperature=1.0,
                        top_p=0.9,
                        max_tokens=MAX_TOKENS,
                        extra_body={} if goal is None else {"vllm_xargs": goal},
                    )
                except APIStatusError as error:
                    return Answer("", str(error.status_code))
                choice = completion.choices[0]
                return Answer(choice.message.content or "", choice.finish_reason)

        return await asyncio.gather(*map(ask, range(count)))


def _question(index: int) -> str:
    kind = KINDS[index % len(KINDS)]
    adjective = ADJECTIVES[index // len(KINDS) % len(ADJECTIVES)]
    article = "an" if adjective[0] in "aeiou" else "a"
    return (
        f"You have been to {article} {adjective} {kind}, or have used it. Write a review of it as "
        f"JSON, with a title, a review, the audience and the price."
    )


if __name__ == "__main__":
    main()
