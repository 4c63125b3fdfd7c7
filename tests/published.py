"""Writes HMMs in the checkpoint formats of TRACE and Ctrl-G."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from foretrace.hmm import HMM


def write_published(folder: Path, hmm: HMM, layout: str) -> None:
    """Write an HMM in the format of TRACE ("trace") or Ctrl-G ("ctrl-g")."""
    identity = torch.eye(hmm.num_states, dtype=hmm.initial.dtype)
    tensors = {
        "alpha_exp": hmm.transition.predict(identity),
        "beta": hmm.emission.predict(identity).log(),  # (h, V), state-major
    }
    if layout == "trace":
        tensors["gamma_exp"] = hmm.initial[None].clone()
        config = {
            "hidden_size": hmm.num_states,
            "vocab_size": hmm.vocab_size,
            "eos_token_id": 5,
            "sep_token_id": None,
        }
    else:
        tensors["gamma"] = hmm.initial.log()
        config = {"hidden_states": hmm.num_states}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config |= {"vocab_size": hmm.vocab_size, "eos_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config))
