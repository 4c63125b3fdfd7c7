"""Wrong usage: one sentence or two, no traceback, exit code 2, and nothing is loaded."""

import re

import pytest

from forked import Run

GENERATE = ["generate", "no-lm", "--goal", "odd", "--prompt", "w1"]
FIT = ["fit", "--out", "a.safetensors"]
DISTILL = ["distill", "no-lm", "--out", "hmm"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["generat"], "No such command 'generat'"),
        (["generate"], "Missing argument"),
        (["generate", "no-lm"], "Pass a prompt: --prompt TEXT, or --prompts FILE."),
        (["generate", "no-lm", "--prompt", "w1", "--level", "mild"], "--level needs a --goal"),
        ([*GENERATE, "--length", "9"], "--max-new-tokens"),
        *(
            ([*GENERATE, "--strength", strength], f"from 0.01 to 1000, not '{strength}'")
            for strength in ("1e9", "0.001", "-1", "inf", "nan", "strong")
        ),
        ([*GENERATE, "--strength", "1", "--level", "mild"], "--strength or --level, not both"),
        ([*GENERATE, "--level", "huge"], "'mild', 'medium', 'strong'"),
        ([*GENERATE, "--transform", "1"], "SCALE,SHIFT"),
        ([*GENERATE, "--column", "text"], "--column is an option of --prompts"),
        ([*GENERATE, "--max-new-tokens", "0"], "value for '--max-new-tokens'"),
        ([*GENERATE, "--max-new-tokens", "many"], "value for '--max-new-tokens'"),
        ([*GENERATE, "--temperature", "-1"], "value for '--temperature'"),
        ([*GENERATE, "--top-p", "2"], "value for '--top-p'"),
        ([*GENERATE, "--seed", f"{2**64}"], "value for '--seed'"),
        ([*GENERATE, "--horizon", "-1"], "value for '--horizon'"),
        (["explain", "no-lm"], "Missing option '--goal'"),
        (["calibrate", "no-lm", "--attribute", "a", "--budget", "mild"], "LEVEL=NATS"),
        ([*DISTILL, "--sequences", "many"], "'many' is not a count"),
        ([*DISTILL, "--engine-options", "{"], "JSON"),
        ([*DISTILL, "--prompts", "a.txt", "--chat", "b.txt"], "Pass --prompts to continue texts"),
        (FIT, "--lm"),
        (["hmm", "show"], "Missing argument"),
        (
            ["hmm", "sparsify", "hmm", "--out", "small", "--tolerance", "x"],
            "value for '--tolerance'",
        ),
    ],
)
def test_wrong_usage_is_one_message(run: Run, command: list[str], expected: str) -> None:
    done = run(*command)
    assert (done.code, done.out) == (2, "")
    message = " ".join(re.sub("[│─╭╮╰╯]", " ", done.err).split())
    assert expected in message
    assert "Traceback" not in message
