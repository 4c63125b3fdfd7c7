"""What tokens spell: of tokenizers of both kinds, made here, against the texts that they read."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import foretrace as ft
from foretrace.engines.token_bytes import decode_vocabulary
from foretrace.errors import InvalidInputError
from foretrace.steering.markers import CompiledMarker
from tiny_lm import word_tokenizer

TEXT = ["It was the best of times, it was the worst of times;\n\tnaïve 漢字 12.", "(a b) ?! Yes."]
SPECIAL = ["<end>"]


def made(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_level() -> Any:
    """A tokenizer as GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return made(tokenizer)


def sentence_piece() -> Any:
    """A tokenizer as Llama 2, Mistral and Gemma have it: spaces as a sign, bytes if all fails."""
    letters = sorted(set("".join(TEXT)) - {" ", "\n", "漢"})
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters]
    pieces += ["\u2581t", "im", "es", "\u2581the"]
    merges = [("\u2581", "t"), ("i", "m"), ("e", "s")]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token=None)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return made(tokenizer)


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=20))
@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()])
def test_texts_are_spelled_by_their_tokens(tokenizer: Any, text: str) -> None:
    known = decode_vocabulary(tokenizer)
    found = b"".join(known[token] for token in tokenizer(text).input_ids)
    assert found.removeprefix(b" ") == text.encode().removeprefix(b" ")


def test_tokens_that_control_spell_nothing_and_others_what_they_say() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    known = decode_vocabulary(tokenizer)
    assert known[tokenizer.eos_token_id] == b""
    assert known[tokenizer.convert_tokens_to_ids("<think>")] == b"<think>"


def test_what_is_mentioned_is_found_in_texts() -> None:
    tokenizer = byte_level()
    attribute = ft.contains(["times", "naïve"], tokenizer)
    texts = ["the best of times", "best of time", "I am naïve", "timess", "naive"]
    ids = [tokenizer(text).input_ids for text in texts]
    assert attribute.probability(ids).tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert (~attribute).probability(ids).tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]


def test_markers_are_found_in_any_tokens_and_as_special_ones() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("</think>", special=False)])
    text = tokenizer("the </think> naïve<end>").input_ids
    for marker, last in (("</think>", "</think>"), ("<end>", "<end>"), ("naïve<e", "<end>")):
        found = CompiledMarker.of(ft.marker(marker, tokenizer))
        position = text.index(tokenizer.convert_tokens_to_ids(last))
        assert found.end_of_first(text) == position + 1
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "</think>"]
    assert ft.marker("</think>", tokenizer).is_suffix_of(spelled)
    assert ft.marker("a", tokenizer) == ft.marker("a", tokenizer) != ft.marker("b", tokenizer)
    with pytest.raises(InvalidInputError, match="text of 1 to 512 bytes"):
        ft.marker("", tokenizer)


def test_another_kind_of_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="byte-level or SentencePiece"):
        decode_vocabulary(word_tokenizer())
