"""`foretrace playground`: a page to try goals on, with a language model here or a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import goal_options as options
from foretrace.errors import InvalidInputError

if TYPE_CHECKING:
    from foretrace.cli.playground.backend import Author

EPILOG = "Example: foretrace playground my-lm --hmm my-hmm --attributes attributes"


def playground(
    model: Annotated[
        str, typer.Argument(help="The language model, or http://... of `foretrace serve`.")
    ],
    hmm: Annotated[
        str | None, typer.Option("--hmm", help="Its HMM: a folder, or a hub id; not for a server.")
    ] = None,
    attributes: options.Attributes = Path(),
    host: Annotated[str, typer.Option(help="Who may see it; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the page is.")] = 7860,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Open a page where prompts are continued bare and steered, side by side."""
    from foretrace.cli.playground.page import launch, require_gradio

    require_gradio()  # before the language model is loaded, which takes longer
    launch(_author(model, hmm, attributes, device, dtype), host, port)


def _author(model: str, hmm: str | None, attributes: Path, device: str, dtype: str) -> "Author":
    from foretrace.cli.model_loading import load_lm
    from foretrace.cli.playground.backend import LocalAuthor
    from foretrace.cli.playground.server_backend import ServerAuthor

    if model.startswith(("http://", "https://")):
        if hmm is not None:
            raise typer.BadParameter("A server has its own HMM: leave --hmm out.")
        return ServerAuthor(model, attributes)
    if hmm is None:
        raise InvalidInputError(f"Give the HMM of {model}: --hmm FOLDER, or a hub id.")
    lm, tokenizer = load_lm(model, dtype, device)
    return LocalAuthor(lm, tokenizer, options.load_hmm(hmm, tokenizer, lm.device), attributes)
