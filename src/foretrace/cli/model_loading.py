"""Tokenizers and language models, by folder or hub id."""

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(source: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer, without its model."""
    from foretrace.errors import InvalidInputError, reason

    transformers = _transformers()
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"The tokenizer '{source}' cannot be loaded ({reason(error)}). Give the folder or the "
            f"hub id of the language model that is to be steered."
        ) from error
    return tokenizer


def load_lm(
    source: str, dtype: str, device: str
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a language model to write with, and its tokenizer."""
    from foretrace.cli.device import choose_device
    from foretrace.distill.sampling.source import load_tokenizer_and_model

    transformers = _transformers()
    quiet()
    place = choose_device(device)
    tokenizer, model = load_tokenizer_and_model(
        source,
        transformers.AutoTokenizer,
        lambda **options: transformers.AutoModelForCausalLM.from_pretrained(source, **options),
        {"dtype": dtype},
    )
    # A model may bring its own taste, a repetition penalty say: that is not the LM's distribution.
    own = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    return model.eval().to(place), tokenizer


def quiet() -> None:
    """Let transformers, if it is there, show no bars of its own among ours."""
    from importlib.util import find_spec

    if find_spec("transformers") is not None:
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _transformers() -> ModuleType:
    from foretrace.errors import InvalidInputError

    try:
        import transformers
    except ImportError as error:
        raise InvalidInputError(
            "This needs transformers: pip install 'foretrace[transformers]'."
        ) from error
    return transformers
