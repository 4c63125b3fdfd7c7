"""Load what commands name: language models, tokenizers and prompts, and choose the device."""

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import typer

from foretrace.cli.terminal import print_warnings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.chat import Messages


def choose_device(device: str) -> str:
    """Return the device to use: under torchrun, a GPU per process."""
    import torch

    from foretrace.distill.em.distributed import launched_group
    from foretrace.errors import InvalidInputError

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InvalidInputError(f"There is no device '{device}'. Use cpu, cuda or auto.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            "CUDA is not available: the machine has no GPU, or torch is built without CUDA. Use "
            "--device cpu, or install torch for CUDA."
        )
    if device.startswith("cuda:") and launched_group().size > 1:
        raise InvalidInputError(
            f"Several processes cannot share {device}. Use --device cuda, which gives each process "
            f"a GPU."
        )
    if device != "cuda":
        return device
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(gpu)
    return gpu


def choose_dtype(dtype: str, device: str) -> str:
    """Return the dtype of a language model; `auto` depends on the device's hardware."""
    from foretrace._hardware import default_dtype
    from foretrace.hmm.probability import dtype_name

    return dtype_name(default_dtype(device)) if dtype == "auto" else dtype


def find_model(source: str) -> None:
    """Check that the folder or file of a model exists; for a hub id, that the hub can be reached.

    If the hub is unreachable, its client is switched to offline mode. Otherwise transformers
    retries for about a minute before it fails. In offline mode it loads downloaded files, or fails
    at once. Child processes inherit the mode.
    """
    from huggingface_hub import constants, get_session

    from foretrace import _io
    from foretrace.errors import reason

    if Path(source).exists():
        return
    _io.require_existing_path(source)
    if constants.HF_HUB_OFFLINE:
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


def load_tokenizer(source: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer without its model."""
    from foretrace.errors import InvalidInputError, reason

    transformers = _require_transformers()
    find_model(source)
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise InvalidInputError(
            f"The tokenizer '{source}' cannot be loaded ({reason(error)}). Pass the folder or the "
            f"hub id of the language model to steer."
        ) from error
    return tokenizer


def load_lm(
    source: str, dtype: str, device: str
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a language model for generation, and its tokenizer."""
    from foretrace.distill.sampling.source import load_tokenizer_and_model
    from foretrace.errors import InvalidInputError
    from foretrace.gguf import is_gguf

    if is_gguf(source):
        raise InvalidInputError(
            f"{source} is a GGUF file, which only `foretrace generate` and `foretrace distill` "
            f"take. Pass the folder or the hub id of the model in the format of transformers."
        )
    print_warnings()
    transformers = _require_transformers()
    disable_transformers_progress()
    find_model(source)
    chosen_device = choose_device(device)
    tokenizer, model = load_tokenizer_and_model(
        source,
        transformers.AutoTokenizer,
        lambda **options: transformers.AutoModelForCausalLM.from_pretrained(source, **options),
        {"dtype": choose_dtype(dtype, chosen_device)},
    )
    # Drop the model's sampling defaults, such as a repetition penalty: they change the LM's
    # distribution.
    defaults = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=defaults.eos_token_id, pad_token_id=defaults.pad_token_id
    )
    return model.eval().to(chosen_device), tokenizer


def disable_transformers_progress() -> None:
    """Turn off the progress bars of transformers, if it is installed."""
    from importlib.util import find_spec

    if find_spec("transformers") is not None:
        from transformers.utils import logging

        logging.disable_progress_bar()


def _require_transformers() -> ModuleType:
    from foretrace.errors import InvalidInputError

    try:
        import transformers
    except ImportError as error:
        raise InvalidInputError(
            "This command needs transformers: pip install 'foretrace[transformers]'."
        ) from error
    return transformers


def read_prompts(file: Path, column: str | None = None) -> list[str]:
    """Read prompts from a column of a file; by default `prompt` if it exists, else `text`."""
    from foretrace import _tabular

    rows = _tabular.read_rows(file, [column] if column else [])
    name = column or ("prompt" if rows and "prompt" in rows[0] else "text")
    return _tabular.texts(rows, name, file)


def read_chats(file: Path) -> "list[Messages]":
    """Read chats from a file: its column `messages` if it exists, else one user message per row."""
    from foretrace import _tabular
    from foretrace.chat import as_messages, is_chat
    from foretrace.errors import InvalidFileError

    rows = _tabular.read_rows(file)
    if not rows or "messages" not in rows[0]:
        return [as_messages(text) for text in read_prompts(file)]
    chats = _tabular.column(rows, "messages", file)
    for number, chat in enumerate(chats, 1):
        if not is_chat(chat):
            raise InvalidFileError(
                f"{file}: 'messages' of row {number} is not a list of messages. Write "
                f'[{{"role": "user", "content": "..."}}].'
            )
    return chats
