"""Load tokenizers and language models from a folder or the Hugging Face hub."""

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(source: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer without its model."""
    from foretrace.cli.hub import skip_retries_if_unreachable
    from foretrace.errors import InvalidInputError, reason

    transformers = _require_transformers()
    skip_retries_if_unreachable(source)
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"The tokenizer '{source}' cannot be loaded ({reason(error)}). Pass the folder or the "
            f"hub id of the language model to steer."
        ) from error
    return tokenizer


def load_lm(
    source: str, dtype: str, device: str
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a language model for generation, and its tokenizer."""
    from foretrace.cli.device import choose_device, choose_dtype
    from foretrace.cli.hub import skip_retries_if_unreachable
    from foretrace.cli.log_warnings import print_warnings
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
    skip_retries_if_unreachable(source)
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
