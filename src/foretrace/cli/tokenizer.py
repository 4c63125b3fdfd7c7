"""The tokenizer of a language model, by folder or hub id."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(source: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer, without its model."""
    from foretrace.errors import InvalidInputError, reason

    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InvalidInputError(
            "Tokenizers come with transformers: pip install 'foretrace[transformers]'."
        ) from error
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"The tokenizer '{source}' cannot be loaded ({reason(error)}). Give the folder or the "
            f"hub id of the language model that is to be steered."
        ) from error
    return tokenizer
