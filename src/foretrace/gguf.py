"""GGUF files: language models of llama.cpp, and their tokenizers."""

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from functools import cached_property
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from foretrace.errors import InvalidFileError, InvalidInputError, reason
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from llama_cpp import Llama

SUFFIX = ".gguf"


def is_gguf(source: str) -> bool:
    """Return whether the name of a language model is the name of a GGUF file.

    Example:
        >>> from foretrace.gguf import is_gguf
        >>> is_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
        True
    """
    return source.lower().endswith(SUFFIX)


def load_llama(file: str, **options: Any) -> "Llama":
    """Load a GGUF file with llama.cpp.

    Args:
        file: The GGUF file.
        **options: Options of `llama_cpp.Llama`, such as `n_ctx`.

    Returns:
        The language model.

    Raises:
        InvalidFileError: There is no such file, or llama.cpp cannot load it.
        InvalidInputError: llama-cpp-python is not installed.

    Example:
        >>> from foretrace.gguf import load_llama
        >>> llm = load_llama("SmolLM2-135M-Instruct.Q4_1.gguf", n_ctx=256)  # doctest: +SKIP
    """
    llama_cpp = _require_llama_cpp()
    if not Path(file).is_file():
        raise InvalidFileError(f"There is no file {file}. Pass the path of a GGUF model.")
    settings = {"verbose": False, **options}
    # It warns on the standard error stream of contexts that are longer than the LM was trained
    # with: also if it loads no more than the vocabulary, and for several sequences together.
    quiet = nullcontext() if settings["verbose"] else redirect_stderr(StringIO())
    try:
        with quiet:
            return llama_cpp.Llama(file, **settings)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise InvalidFileError(
            f"The model {file} cannot be loaded ({reason(error)}). Pass a complete GGUF file of a "
            f"causal language model that this version of llama.cpp supports, and check the "
            f"options of the engine and the free memory."
        ) from error


class AddedToken(NamedTuple):
    """A token that is no part of the text's encoding: a special one, or one that users added."""

    content: str
    special: bool


class Encoding(dict[str, list[Any]]):
    """The token ids of a text, or of each of several texts, as `input_ids`."""

    @property
    def input_ids(self) -> list[Any]:
        """The token ids."""
        return self["input_ids"]


class GGUFTokenizer:
    """The tokenizer of a GGUF file.

    It has the methods of transformers' tokenizers that foretrace calls, so that functions
    such as `foretrace.contains` accept either.

    Args:
        llm: A `llama_cpp.Llama`. One that was loaded with `vocab_only=True` suffices.

    Example:
        >>> from foretrace.gguf import GGUFTokenizer
        >>> tokenizer = GGUFTokenizer(llm)  # doctest: +SKIP
        >>> refund = ft.contains("refund", tokenizer)  # doctest: +SKIP
    """

    def __init__(self, llm: "Llama") -> None:
        self.llm = llm
        self._api = _require_llama_cpp()
        self._vocabulary = self._api.llama_model_get_vocab(llm.model)

    @classmethod
    def from_file(cls, file: str) -> "GGUFTokenizer":
        """Load the tokenizer of a GGUF file, without the language model."""
        return cls(load_llama(file, vocab_only=True))

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text; None if there is none."""
        return _known(self.llm.token_bos())

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None if there is none."""
        return _known(self.llm.token_eos())

    @property
    def chat_template(self) -> str | None:
        """The chat template of the file; None if there is none."""
        template: str | None = self.llm.metadata.get("tokenizer.chat_template")
        return template

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Special tokens, and tokens that users added, by id."""
        special = self._api.LLAMA_TOKEN_ATTR_CONTROL
        added = special | self._api.LLAMA_TOKEN_ATTR_USER_DEFINED
        return {
            token: AddedToken(text, bool(self._attributes(token) & special))
            for text, token in self.get_vocab().items()
            if self._attributes(token) & added
        }

    @property
    def all_special_ids(self) -> list[int]:
        """The special tokens."""
        return [token for token, added in self.added_tokens_decoder.items() if added.special]

    @cached_property
    def end_token_ids(self) -> list[int]:
        """The tokens with which llama.cpp ends a text."""
        ends = self._api.llama_vocab_is_eog
        return [token for token in self.all_special_ids if ends(self._vocabulary, token)]

    @cached_property
    def fingerprint(self) -> str:
        """`foretrace.fingerprint` of the vocabulary."""
        return fingerprint(self.get_vocab())

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens by their text, without tokens that pad the vocabulary."""
        return self._ids

    @cached_property
    def _ids(self) -> dict[str, int]:
        unused = self._api.LLAMA_TOKEN_ATTR_UNUSED
        text = self._api.llama_vocab_get_text
        return {
            text(self._vocabulary, token).decode("utf-8", "surrogateescape"): token
            for token in range(self.llm.n_vocab())
            if not self._attributes(token) & unused
        }

    def _attributes(self, token: int) -> int:
        return int(self._api.llama_vocab_get_attr(self._vocabulary, token))

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
    ) -> Encoding:
        """Convert a text, or each of several texts, to token ids.

        `add_special_tokens` adds the tokens that the file demands around texts. Special tokens in a
        text are recognised, unless `split_special_tokens` takes them for text.
        """

        def encode(one: str) -> list[int]:
            known = not split_special_tokens
            return list(self.llm.tokenize(one.encode(), add_bos=add_special_tokens, special=known))

        ids = encode(text) if isinstance(text, str) else [encode(one) for one in text]
        return Encoding(input_ids=ids)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Convert token ids to a text, without special tokens; broken characters become U+FFFD."""
        return b"".join(map(self._piece, token_ids)).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        """Return the bytes of a token; none for special ones."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self._api.llama_token_to_piece(self._vocabulary, token, buffer, size, 0, False)
            if length >= 0:
                return buffer.raw[:length]
            size = -length  # the size that it needs

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, **_: Any
    ) -> str:
        """Return the text of a chat by the chat template of the file, with all special tokens.

        It raises a jinja2.TemplateError if the template refuses the messages.
        """
        from jinja2 import TemplateError
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        names = {token: text for text, token in self.get_vocab().items()}
        formatter = Jinja2ChatFormatter(
            self.chat_template or "",
            eos_token=names.get(self.llm.token_eos(), ""),
            bos_token=names.get(self.llm.token_bos(), ""),
            add_generation_prompt=add_generation_prompt,
        )
        try:
            return str(formatter(messages=messages).prompt)
        except ValueError as error:  # from the template's `raise_exception`
            raise TemplateError(str(error)) from error


def _known(token: int) -> int | None:
    return None if token < 0 else token


def _require_llama_cpp() -> ModuleType:
    try:
        import llama_cpp
    except ImportError:
        raise InvalidInputError(
            "llama-cpp-python is not installed in this environment: pip install "
            "'foretrace[llama-cpp]'."
        ) from None
    return llama_cpp  # type: ignore[no-any-return]
