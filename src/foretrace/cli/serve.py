"""`foretrace serve`: vLLM's server, in which every request can name its goal."""

import os
import sys
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import Annotated

import typer

from foretrace.cli import goal_options as options
from foretrace.errors import InvalidInputError

EPILOG = (
    "Example: foretrace serve my-lm --hmm my-hmm --attributes attributes --port 8000 --dtype "
    "bfloat16"
)
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
PROCESSOR = "foretrace.engines.vllm:SteeringProcessor"
MIDDLEWARE = "foretrace.engines.vllm.middleware.Admission"


def serve(
    context: typer.Context,
    model: options.Model,
    hmm: options.HMMSource,
    attributes: options.Attributes,
    horizon: options.Horizon = 64,
    memory: Annotated[int, typer.Option(min=1, help="MB for tables on the device.")] = 1024,
    tables: Annotated[
        Path | None, typer.Option(help="Where to keep tables; else a folder for temporary files.")
    ] = None,
    disk: Annotated[int, typer.Option(min=1, help="MB for tables on the disk.")] = 8192,
    body: Annotated[int, typer.Option(min=1, help="MB that a request's body has at most.")] = 32,
) -> None:
    """Start vLLM's OpenAI-compatible server; options that are not named here are vLLM's own."""
    from foretrace.attribute import AttributeStore
    from foretrace.engines.vllm.settings import Settings
    from foretrace.hmm import HMM

    _require_vllm()
    _refuse(context.args)
    known = HMM.from_pretrained(hmm)
    names = list(AttributeStore(attributes))
    settings = Settings(
        hmm=str(Path(hmm).resolve()) if Path(hmm).is_dir() else hmm,
        attributes=str(attributes.resolve()),
        tokenizer=_tokenizer(context.args, model),
        tables=str((tables or Path(gettempdir())).resolve()),
        horizon=horizon,
        memory_mb=memory,
        disk_mb=disk,
        body_mb=body,
    )
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    typer.echo(f"HMM: {known}", err=True)
    typer.echo(f"attributes: {len(names):,} in {attributes} ({shown})", err=True)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--logits-processors", PROCESSOR, "--middleware", MIDDLEWARE, *context.args]
    os.environ.update(settings.to_environment())
    # Counters of the process that decodes are collected from files, by the one that answers.
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = mkdtemp(prefix="foretrace-metrics-")
    sys.stderr.flush()
    os.execv(sys.executable, command)


def _tokenizer(arguments: list[str], model: str) -> str:
    """Find which tokenizer vLLM will use: its own option, or the model's."""
    for place, each in enumerate(arguments):
        name, _, value = each.partition("=")
        if name == "--tokenizer":
            return value or next(iter(arguments[place + 1 :]), model)
    return model


def _refuse(arguments: list[str]) -> None:
    """Refuse options of vLLM that would leave texts unsteered."""
    for each in arguments:
        if each.startswith("--spec"):
            raise InvalidInputError(
                f"{each}: speculative decoding drafts tokens that are not steered. Serve without."
            )
        if each.startswith("--logits-processors"):
            raise InvalidInputError(
                f"{each}: vLLM would take these instead of foretrace's. Start vLLM itself, with "
                f"{PROCESSOR} among them; docs/serving.md says how."
            )


def _require_vllm() -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise InvalidInputError("vLLM is not installed. Install it: pip install 'foretrace[vllm]'.")
