"""A server of a real LM, shared by the tests that talk to it over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy_files import DEPLOY
from foretrace.context import Probe, read_head
from foretrace.hmm import HMM
from random_attributes import random_context, write_random
from server import API_KEY, HOSTILE_KEY, RealServer, serving, steered
from small_server import any_model as any_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2-135m"


@pytest.fixture(scope="session")
def real_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Serve SmolLM2 with four attributes, one of them by context, API keys, and logs in JSON."""
    folder = tmp_path_factory.mktemp("real")
    hmm = HMM.from_pretrained(EXAMPLE)
    for i in range(3):
        known = hmm.config.tokenizer_fingerprint
        write_random(folder / "attributes", f"a{i}", hmm.vocab_size, share=0.5, known=known, seed=i)
    probe = Probe.build(read_head(smollm2))
    probe.save(folder / "probe.safetensors")
    random_context(probe).save(folder / "attributes" / "moody.safetensors")
    server = RealServer("", folder / "attributes", folder / "tables", folder / "log")
    options = ["--max-num-seqs", 16, "--api-key", API_KEY, HOSTILE_KEY, "--tables", server.tables]
    options += ["--probe", folder / "probe.safetensors"]
    options += ["--enable-scale-out"]  # the route /inference/v1/generate
    command = steered(smollm2, EXAMPLE, server.attributes, *options)
    environment = {"VLLM_LOGGING_CONFIG_PATH": str(DEPLOY / "logging.json")}
    with serving(command, server.log, environment=environment) as address:
        yield server._replace(address=address)
