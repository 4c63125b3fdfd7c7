"""`foretrace serve`: start vLLM's server with steering, so that each request can name a goal."""

import os
import sys
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated

import typer

from foretrace.cli import goal_options
from foretrace.cli.loading import choose_device, choose_dtype, find_model, load_lm, load_tokenizer
from foretrace.errors import InvalidInputError

EPILOG = "Example: foretrace serve my-lm --hmm my-hmm --attributes attributes --port 8000"
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
PROCESSOR = "foretrace.engines.vllm:SteeringProcessor"
MIDDLEWARE = "foretrace.engines.vllm.admission.SteeringMiddleware"


def serve(
    context: typer.Context,
    model: goal_options.Model,
    attributes: goal_options.Attributes,
    hmm: goal_options.OptionalHMM = None,
    probe: Annotated[
        Path | None,
        typer.Option(help="The LM's probe, for attributes with a context reward."),
    ] = None,
    horizon: goal_options.Horizon = 64,
    memory: Annotated[int, typer.Option(min=1, help="Device memory for tables, in MB.")] = 1024,
    tables: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the tables' disk cache. Default: the folder for temporary files."
        ),
    ] = None,
    disk: Annotated[int, typer.Option(min=1, help="Disk space for tables, in MB.")] = 8192,
    body: Annotated[int, typer.Option(min=1, help="Maximum size of a request's body, in MB.")] = 32,
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Start vLLM's OpenAI-compatible server. Other options are passed on to vLLM."""
    from foretrace.attribute import AttributeStore
    from foretrace.context import Probe, read_head
    from foretrace.engines.vllm.settings import Settings
    from foretrace.engines.vllm.table_store import process_folder
    from foretrace.hmm import HMM

    _require_vllm()
    _check_vllm_options(context.args)
    find_model(model)
    if probe is not None:
        Probe.load(probe, fingerprint=read_head(model).fingerprint)
    names = list(AttributeStore(attributes))
    folder, tokenizer = tables or Path(gettempdir()), _tokenizer(context.args, model)
    hmm = hmm or _measure_frequencies(model, tokenizer, dtype, folder)
    loaded_hmm = HMM.from_pretrained(hmm)
    settings = Settings(
        hmm=str(Path(hmm).resolve()) if Path(hmm).is_dir() else hmm,
        attributes=str(attributes.resolve()),
        tokenizer=tokenizer,
        probe="" if probe is None else str(probe.resolve()),
        tables=str(folder.resolve()),
        horizon=horizon,
        memory_mb=memory,
        disk_mb=disk,
        body_mb=body,
    )
    examples = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    typer.echo(f"HMM: {loaded_hmm}", err=True)
    typer.echo(f"attributes: {len(names):,} in {attributes} ({examples})", err=True)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--dtype", choose_dtype(dtype, choose_device("auto"))]
    command += ["--logits-processors", PROCESSOR, "--middleware", MIDDLEWARE, *context.args]
    os.environ.update(settings.to_environment())
    # The engine process writes its metrics to files, which the API process collects.
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(process_folder(folder, "foretrace-metrics"))
    sys.stderr.flush()
    os.execv(sys.executable, command)


def _measure_frequencies(model: str, tokenizer: str, dtype: str, folder: Path) -> str:
    """Write the HMM of the LM's token frequencies into a folder; return its path.

    Every start with the same LM writes the same files.
    """
    import torch

    from foretrace.engines.vllm.table_store import private_folder

    try:
        lm, own = load_lm(model, dtype, "auto")  # vLLM replaces this process, and its memory
        texts = own if tokenizer == model else load_tokenizer(tokenizer)
        hmm = goal_options.load_or_measure_hmm(None, lm, texts)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidInputError(
            f"'{model}' does not fit on one device, where its token frequencies are measured "
            f"before vLLM starts. Pass an HMM: --hmm FOLDER."
        ) from error
    path = private_folder(folder, "foretrace-frequencies") / hmm.checksum
    hmm.save_pretrained(path)
    return str(path)


def _tokenizer(arguments: list[str], model: str) -> str:
    """Return the tokenizer that vLLM uses: the value of --tokenizer, or the model."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--tokenizer":
            return value or next(iter(arguments[index + 1 :]), model)
    return model


def _check_vllm_options(arguments: list[str]) -> None:
    """Raise an error for options of vLLM that would disable steering."""
    for argument in arguments:
        if argument.startswith("--logits-processors"):
            raise InvalidInputError(
                f"{argument}: this option would replace foretrace's logits processor. Start vLLM "
                f"directly, and add {PROCESSOR} to its processors, as in docs/guides/serve.md."
            )


def _require_vllm() -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise InvalidInputError("vLLM is not installed: pip install 'foretrace[vllm]'.")
