"""Chats: messages as token ids by a tokenizer's chat template, and the token that ends a turn."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from foretrace.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]
"""The messages of a chat: `{"role": ..., "content": ...}` each."""
Prompt = str | Messages
"""A text to continue, or a chat to answer."""

_PLACEHOLDER = "answer"


def is_chat(prompt: object) -> TypeGuard[Messages]:
    """Return whether a prompt is a list of messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) for message in prompt)
    )


def as_messages(text: str, system: str | None = None) -> Messages:
    """Return a user's message as a chat, after a system message if there is one."""
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def encode_chat(tokenizer: "PreTrainedTokenizerBase", messages: Messages) -> list[int]:
    """Return the token ids of a chat, up to where the answer begins.

    Raises:
        InvalidInputError: If a message lacks its role or content, or if the tokenizer has no chat
            template or one that refuses the messages.
    """
    return _encode(tokenizer, render_chat(tokenizer, messages))


def render_chat(tokenizer: "PreTrainedTokenizerBase", messages: Messages) -> str:
    """Return the text of a chat, with all special tokens, up to where the answer begins.

    Raises:
        InvalidInputError: As `encode_chat`.
    """
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InvalidInputError(
                f"A message must have a role and a content, both texts, but has "
                f"{', '.join(message) or 'nothing'}."
            )
    return _render(tokenizer, messages, add_generation_prompt=True)


def end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the special token that ends an answer in the chat template; None if there is none."""
    chat = [*as_messages("question"), {"role": "assistant", "content": _PLACEHOLDER}]
    after = _render(tokenizer, chat).rpartition(_PLACEHOLDER)[2]
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", ()))
    return next((token for token in _encode(tokenizer, after) if token in special), None)


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    # Templates contain the special tokens; the tokenizer must not add them again.
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _render(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, *, add_generation_prompt: bool = False
) -> str:
    if not tokenizer.chat_template:
        raise InvalidInputError(
            "The tokenizer has no chat template, so that it cannot take messages. Use a model that "
            "was tuned for chats, or pass prompts as plain texts."
        )
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )
    except TemplateError as error:
        raise InvalidInputError(
            f"The chat template refuses the messages ({error}). Check their roles and their order."
        ) from error
