"""`foretrace probe`: make the file that reads an LM's hidden state from its logits."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import goal_options
from foretrace.cli.loading import choose_device, find_model, load_lm

if TYPE_CHECKING:
    from foretrace.context import Head, Probe

EPILOG = "Example: foretrace probe my-lm --out my-probe.safetensors"
TEXTS = (
    "The lighthouse stood on the cliff, and every evening the keeper climbed its stairs.",
    "In 1987 the committee reported that prices had risen by 3.4 percent in a single year.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "I was disappointed: the room was cold, and nobody answered the phone. Never again!",
)


def probe(
    model: Annotated[
        str, typer.Argument(help="The language model: a folder, a hub id, or a GGUF file.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write, such as my-probe.safetensors.")],
    features: Annotated[
        int, typer.Option(help="The number of features of each token that the file keeps.")
    ] = 64,
    original: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="LM|PROBE",
            help="The LM that a GGUF file was quantised from, or its probe: accept its attributes.",
        ),
    ] = None,
    run: Annotated[
        bool, typer.Option(help="Also load the LM, and measure the error on its own texts.")
    ] = True,
    device: goal_options.Device = "auto",
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Make the probe of an LM, which computes its last hidden state back from its logits."""
    from foretrace.context import Probe, read_head
    from foretrace.context.measure import synthetic_errors
    from foretrace.distill.sampling.source import public_name
    from foretrace.gguf import is_gguf

    find_model(model)
    head = read_head(model)
    head = replace(head, weight=head.weight.to(choose_device(device)))
    copied = None
    if original is not None:
        is_probe = Path(original).is_file() and not is_gguf(original)
        copied = Probe.load(original) if is_probe else read_head(original)
    built = Probe.build(head, features=features, source=public_name(model), original=copied)
    errors = synthetic_errors(built)
    if run and is_gguf(model) and find_spec("llama_cpp"):
        errors |= _run_llama(built, head, model)
    elif run and not is_gguf(model) and find_spec("transformers"):
        errors |= _run_transformers(built, model, dtype, device)
    built = built.with_errors(errors)
    built.save(out)
    _describe(built, out)


def _run_transformers(probe: "Probe", model: str, dtype: str, device: str) -> dict[str, float]:
    """Return errors for hidden states of the LM, as it passes them to its head."""
    import torch

    from foretrace.context.measure import state_error

    lm, tokenizer = load_lm(model, dtype, device)
    states: list[torch.Tensor] = []
    hook = lm.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: states.append(inputs[0][0].float().cpu())
    )
    with torch.inference_mode(), hook:
        logits = [
            lm(**tokenizer(text, return_tensors="pt").to(lm.device)).logits[0].cpu()
            for text in TEXTS
        ]
    own, rounded = torch.cat(logits), torch.cat(logits).bfloat16()
    kind = str(own.dtype).removeprefix("torch.")
    errors = {f"states of the LM, {kind}": state_error(probe, own, torch.cat(states))}
    return errors | {"states of the LM, bfloat16": state_error(probe, rounded, torch.cat(states))}


def _run_llama(probe: "Probe", head: "Head", file: str) -> dict[str, float]:
    """Return the error of all logits of llama.cpp, computed again from the states."""
    import torch

    from foretrace.context.measure import logit_error
    from foretrace.gguf import load_llama

    on_host = replace(head, weight=head.weight.cpu())
    llm, errors = load_llama(file, n_ctx=256, logits_all=True), []
    for text in TEXTS:
        tokens = llm.tokenize(text.encode())
        llm.reset()
        llm.eval(tokens)
        errors.append(logit_error(probe, on_host, torch.from_numpy(llm.scores[: len(tokens)])))
    llm.close()
    return {"logits of llama.cpp, all tokens": max(errors)}


def _describe(probe: "Probe", out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    config = probe.config
    table = Table(show_header=False, box=None)
    table.add_row("hidden state", f"{len(probe.inverse):,} numbers")
    table.add_row("tokens read", f"{len(probe.tokens):,} of {probe.vocab_size:,}")
    table.add_row("condition number", f"{config.condition:.1f}")
    for name, error in config.errors.items():
        table.add_row("relative error", f"{error:.1e} ({name})")
    kept = f"{probe.features.shape[1]} a token, {config.variance_kept:.0%} of the variance"
    table.add_row("features", kept)
    Console().print(table)
    typer.echo(f"written to {out} ({out.stat().st_size / 1e6:.1f} MB)")
