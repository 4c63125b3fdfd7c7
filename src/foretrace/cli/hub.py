"""Avoid the retries of the Hugging Face hub's client where there is no network."""

import os
import re
from pathlib import Path

import typer

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def skip_retries_if_unreachable(source: str) -> None:
    """Switch the hub's client to offline mode if `source` is a hub id and the hub is unreachable.

    Otherwise transformers retries for about a minute before it fails. In offline mode it loads
    downloaded files, or fails at once. Child processes inherit the mode.
    """
    from huggingface_hub import constants, get_session

    from foretrace.errors import reason

    if constants.HF_HUB_OFFLINE or Path(source).exists() or not HUB_ID.fullmatch(source):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the name service, a proxy, TLS, a timeout
        typer.echo(
            f"{constants.ENDPOINT} cannot be reached ({reason(error)}). Only downloaded files are "
            f"used.",
            err=True,
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
