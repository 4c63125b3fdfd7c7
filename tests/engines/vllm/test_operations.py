"""What operators see of a real server: JSON logs, and the metrics of the files in `deploy/`."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from openai import BadRequestError

from deploy_files import DEPLOY, named_metrics
from foretrace.attribute import Attribute
from server import ask_all, completion, serving, steered
from tiny_lm import WORDS, chat_tokenizer, tiny_hmm, write_tiny_lm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's own are many


def test_logs_are_json_and_metrics_have_the_names_of_the_dashboard(tmp_path: Path) -> None:
    hmm = tiny_hmm(chat_tokenizer(), states=16)
    hmm.save_pretrained(tmp_path / "hmm")
    attributes, log = tmp_path / "attributes", tmp_path / "log"
    known = hmm.config.tokenizer_fingerprint
    weights = [0.5, *[0.9] * (len(WORDS) - 1)]
    attribute = Attribute.from_weights(weights, name="a", tokenizer_fingerprint=known)
    attribute.save(attributes / "a.safetensors")
    (attributes / "broken.safetensors").write_bytes(b"not a safetensors file")
    lm = write_tiny_lm(tmp_path / "lm", chat_tokenizer(), heads=1)
    command = steered(lm, tmp_path / "hmm", attributes, "--tables", tmp_path / "tables")
    environment = {"VLLM_LOGGING_CONFIG_PATH": str(DEPLOY / "logging.json")}
    with serving(command, log, environment=environment) as address:
        goals = [{"goal": "a"}, {"goal": "broken"}]
        answers = ask_all(address, [completion([1], goal, max_tokens=4) for goal in goals])
        with urllib.request.urlopen(f"{address}/metrics") as page:
            metrics = page.read().decode()
    assert answers[0].usage.completion_tokens == 4
    assert isinstance(answers[1], BadRequestError)

    records = _records(log)
    assert all(
        {"time", "level", "logger", "process", "message"} <= set(record) for record in records
    )
    by_attribute = {record["attribute"]: record for record in records if "attribute" in record}
    assert "was not calibrated" in by_attribute["a"]["message"]  # in the process that builds
    assert by_attribute["a"]["level"] == "WARNING"
    assert "is refused" in by_attribute["broken"]["message"]
    assert by_attribute["broken"]["level"] == "ERROR"

    lines = [line for line in metrics.splitlines() if line.startswith("foretrace_")]
    exposed = {line.replace("{", " ").split()[0] for line in lines}
    assert named_metrics() <= exposed


def _records(log: Path) -> list[dict[str, Any]]:
    """Parse the JSON lines of a log; warnings of Python and C++ libraries are plain text."""
    lines = log.read_text("utf-8", "replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
