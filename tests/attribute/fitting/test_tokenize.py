"""Test that texts are tokenized as continuations."""

import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretrace.attribute import tokenize
from foretrace.attribute.fitting.examples import marks_words_by_space
from foretrace.errors import InvalidInputError


def byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words include the space before them, as in GPT-2."""
    words = ["<|end|>", "<", "|", ">", "end", "word", "Ġword", "a", "Ġa", "Ġ", "w"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, "w"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer that marks every word itself, as in Llama 2."""
    words = ["<|end|>", "▁word", "▁a", "▁", "?"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, "?"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def test_a_space_is_added_if_the_tokenizer_marks_words_by_spaces() -> None:
    tokenizer = byte_level()
    assert marks_words_by_space(tokenizer)
    found = tokenize(["word a", " word a"], tokenizer)
    assert [tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in found.token_ids] == [
        ["Ġword", "Ġa"],
        ["Ġword", "Ġa"],
    ]


def test_nothing_is_added_if_the_tokenizer_marks_words_itself() -> None:
    tokenizer = metaspace()
    assert not marks_words_by_space(tokenizer)
    found = tokenize(["word a"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(found.token_ids[0].tolist()) == ["▁word", "▁a"]


def test_a_quoted_end_of_text_token_is_plain_text() -> None:
    tokenizer = byte_level()
    ids = tokenize(["a <|end|>"], tokenizer).token_ids[0]
    assert tokenizer.eos_token_id not in ids


def test_long_texts_are_split_into_equal_windows() -> None:
    found = tokenize(["word " * 10, "a"], byte_level(), window=4)
    lengths = [len(ids) for ids in found.token_ids]
    assert found.texts == [0] * (len(lengths) - 1) + [1]
    assert max(lengths) <= 4
    assert max(lengths[:-1]) - min(lengths[:-1]) <= 1


def test_empty_texts_are_counted_and_refused() -> None:
    with pytest.raises(InvalidInputError, match="2 of 3 texts are empty, the first is number 2"):
        tokenize(["a", "", " \n"], byte_level())
