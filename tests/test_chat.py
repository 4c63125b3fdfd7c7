"""Chats as token ids: the template, its special tokens, and the end of a turn."""

import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.chat import as_messages, encode_chat, end_of_turn, is_chat
from foretrace.errors import InvalidInputError
from tiny_lm import byte_tokenizer, chat_tokenizer, word_tokenizer

END = 1


def test_a_chat_ends_where_the_answer_begins() -> None:
    tokenizer = chat_tokenizer()
    ids = encode_chat(tokenizer, as_messages("w1 w2", "w3"))
    assert tokenizer.convert_ids_to_tokens(ids) == (
        ["system", "w3", "<|end|>", "user", "w1", "w2", "<|end|>", "assistant"]
    )


def test_special_tokens_are_not_doubled() -> None:
    """This tokenizer begins every text with a token, which the template contains already."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.chat_template = "<|endoftext|> " + str(tokenizer.chat_template)
    assert tokenizer("w1").input_ids[0] == 0
    assert encode_chat(tokenizer, as_messages("w1")).count(0) == 1


def test_the_token_after_an_answer_ends_a_turn() -> None:
    assert end_of_turn(chat_tokenizer()) == END
    assert end_of_turn(byte_tokenizer(["hello"], 300)) == 0
    without = chat_tokenizer()
    without.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert end_of_turn(without) is None


def test_chats_are_told_from_texts() -> None:
    assert is_chat(as_messages("hello"))
    assert not is_chat("hello")
    assert not is_chat(["hello"])
    assert not is_chat([])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "user"}], "must have a role and a content"),
        ([{"role": "user", "content": ["w1"]}], "must have a role and a content"),
    ],
)
def test_incomplete_messages_are_refused(messages: list[dict[str, str]], error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        encode_chat(chat_tokenizer(), messages)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no chat template"):
        encode_chat(word_tokenizer(), as_messages("w1"))


def test_the_error_of_a_template_is_shown() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('system messages first') }}"
    with pytest.raises(InvalidInputError, match="system messages first"):
        encode_chat(tokenizer, as_messages("w1"))
