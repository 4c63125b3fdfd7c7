"""What operators see of a real server: JSON logs, and the metrics of the files in `deploy/`."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from openai import BadRequestError

from deploy_files import named_metrics
from foretrace.attribute import Attribute
from foretrace.hmm import HMM
from server import RealServer, ask_all, completion

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2-135m"
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's own are many


def test_logs_are_json_and_metrics_have_the_names_of_the_dashboard(real_server: RealServer) -> None:
    hmm = HMM.from_pretrained(EXAMPLE)
    known = hmm.config.tokenizer_fingerprint
    weights = torch.where(torch.arange(hmm.vocab_size) % 10 == 0, 0.5, 1.0)
    attribute = Attribute.from_weights(weights, name="unknown", tokenizer_fingerprint=known)
    attribute.save(real_server.attributes / "unknown.safetensors")
    broken = real_server.attributes / "broken.safetensors"
    broken.write_bytes(b"not a safetensors file")
    goals = [{"goal": "unknown"}, {"goal": "broken"}]
    requests = [completion([1], goal, max_tokens=4) for goal in goals]
    answers = ask_all(real_server.address, requests)
    broken.unlink()
    with urllib.request.urlopen(f"{real_server.address}/metrics") as page:
        metrics = page.read().decode()
    assert answers[0].usage.completion_tokens == 4
    assert isinstance(answers[1], BadRequestError)

    records = _records(real_server.log)
    assert all(
        {"time", "level", "logger", "process", "message"} <= set(record) for record in records
    )
    by_attribute = {record["attribute"]: record for record in records if "attribute" in record}
    assert "was not calibrated" in by_attribute["unknown"]["message"]  # in the process that builds
    assert by_attribute["unknown"]["level"] == "WARNING"
    assert "is refused" in by_attribute["broken"]["message"]
    assert by_attribute["broken"]["level"] == "ERROR"

    lines = [line for line in metrics.splitlines() if line.startswith("foretrace_")]
    exposed = {line.replace("{", " ").split()[0] for line in lines}
    assert named_metrics() <= exposed


def _records(log: Path) -> list[dict[str, Any]]:
    """Parse the JSON lines of a log; warnings of Python and C++ libraries are plain text."""
    lines = log.read_text("utf-8", "replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
