"""`foretrace generate` with a GGUF file uses llama.cpp."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("llama_cpp", reason="needs the extra `llama-cpp`")

from foretrace.attribute import AttributeStore, ContextReward
from foretrace.context import read_head
from foretrace.hmm import HMM
from forked import Done, Run

pytestmark = pytest.mark.llama_cpp

EXAMPLES = Path(__file__).parents[2] / "examples"
HMM_FOLDER = str(EXAMPLES / "smollm2-135m")


@pytest.fixture
def generate(run: Run, smollm2_gguf: Path) -> Run:
    """Generate eight tokens with the GGUF file."""

    def generate(*options: str, hmm: str = HMM_FOLDER) -> Done:
        folders = ["--hmm", hmm, "--attributes", str(EXAMPLES / "attributes")]
        return run("generate", smollm2_gguf, *folders, "--max-new-tokens", "8", *options)

    return generate


def test_texts_are_compared_with_their_prices(generate: Run) -> None:
    options = ["--prompt", "The film was", "--prompt", "", "--goal", "positive & ~political"]
    options += ["--must-contain", "lighthouse", "--level", "strong", "--top-p", "0.9"]
    options += ["--temperature", "0.8", "--json", "--compare"]
    code, out, error = generate(*options, "--seed", "3")
    assert code == 0, error
    assert "begins a new text" in error
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["The film was", ""]
    for row in rows:
        assert "lighthouse" in row["text"]
        assert "lighthouse" not in row["bare"]["text"]
        assert row["probability"][1] == 1.0
        assert row["price"] > 0
        assert "price" not in row["bare"]
    assert generate(*options, "--seed", "3")[1] == out
    assert generate(*options, "--seed", "4")[1] != out


def test_texts_stand_side_by_side_and_chats_are_answered(generate: Run) -> None:
    options = ["--prompt", "Say something nice.", "--goal", "positive", "--temperature", "0"]
    code, out, error = generate(*options, "--chat", "--compare")
    assert code == 0, error
    assert out.count("nats per token") >= 1
    code, streamed, _ = generate(*options, "--system", "Be brief.")
    _, as_json, _ = generate(*options, "--system", "Be brief.", "--json")
    assert code == 0
    assert streamed == f"Say something nice.\n{json.loads(as_json)['text']}\n\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batch-size", "2"], "llama.cpp generates one text at a time"),
        (["--dtype", "float32"], "--dtype must be auto for a GGUF file"),
    ],
)
def test_options_without_a_counterpart_are_refused(
    generate: Run, options: list[str], expected: str
) -> None:
    code, _, error = generate("--prompt", "a", "--goal", "positive", *options)
    assert code == 2
    assert expected in error


def test_an_hmm_of_another_tokenizer_is_refused(generate: Run, tmp_path: Path) -> None:
    from dataclasses import replace

    hmm = HMM.random(4, 49152, eos_token_id=0)
    config = replace(hmm.config, tokenizer_fingerprint="sha256:0")
    HMM(hmm.initial, hmm.transition, hmm.emission, config).save_pretrained(tmp_path)
    code, _, error = generate("--prompt", "a", "--goal", "positive", hmm=str(tmp_path))
    assert code == 1
    assert "was made with another tokenizer" in error


def test_commands_that_need_transformers_say_so(run: Run, smollm2_gguf: Path) -> None:
    folders = ["--hmm", HMM_FOLDER, "--attributes", EXAMPLES / "attributes"]
    done = run("explain", smollm2_gguf, *folders, "--goal", "positive", "--prompt", "a")
    assert "only `foretrace generate` and `foretrace distill`" in done.err


def test_context_rewards_are_read_from_the_logits_of_llama_cpp(
    run: Run, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """The head of the file makes the probe. Attributes of another LM are refused."""
    store = AttributeStore(tmp_path)
    base = AttributeStore(EXAMPLES / "attributes")["positive"]
    options = ["--hmm", HMM_FOLDER, "--attributes", tmp_path, "--prompt", "a", "--json"]
    options += ["--strength", "1", "--max-new-tokens", "2", "--temperature", "0"]
    readers, writers = 1e-3 * torch.ones(1, 577), torch.ones(1, 576)
    for head, code in ((read_head(smollm2_gguf).fingerprint, 0), ("sha256:0", 1)):
        store.add(base.with_context(ContextReward(readers, writers, head)).renamed("moody"))
        done = run("generate", smollm2_gguf, *options, "--goal", "moody")
        assert done.code == code, done.err
    assert "whose head is sha256:0" in done.err
