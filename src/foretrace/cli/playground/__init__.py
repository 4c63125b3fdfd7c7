"""`foretrace playground`: a web page to try goals, with a local language model or a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import goal_options

if TYPE_CHECKING:
    from foretrace.cli.playground.backends import Backend

EPILOG = "Example: foretrace playground my-lm --hmm my-hmm --attributes attributes"


def playground(
    model: Annotated[
        str, typer.Argument(help="The language model, or the http:// URL of `foretrace serve`.")
    ],
    hmm: goal_options.OptionalHMM = None,
    attributes: goal_options.Attributes = Path(),
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    device: goal_options.Device = "auto",
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Open a web page that shows unsteered and steered continuations side by side."""
    from foretrace.cli.playground.page import launch, require_gradio

    require_gradio()  # fail before the language model is loaded, which takes longer
    launch(_load_backend(model, hmm, attributes, device, dtype), host, port)


def _load_backend(
    model: str, hmm: str | None, attributes: Path, device: str, dtype: str
) -> "Backend":
    from foretrace.cli.loading import load_lm
    from foretrace.cli.playground.backends import LocalBackend, ServerBackend

    if model.startswith(("http://", "https://")):
        if hmm is not None:
            raise typer.BadParameter("A server has an HMM already: leave --hmm out.")
        return ServerBackend(model, attributes)
    lm, tokenizer = load_lm(model, dtype, device)
    loaded_hmm = goal_options.load_or_measure_hmm(hmm, lm, tokenizer)
    build_probe = goal_options.probe_builder(lm, tokenizer)
    return LocalBackend(lm, tokenizer, loaded_hmm, attributes, build_probe)
