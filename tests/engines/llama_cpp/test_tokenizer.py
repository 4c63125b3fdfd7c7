"""The tokenizer of a GGUF file is that of transformers."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs the extra `llama-cpp`")

from foretrace.chat import encode_chat, end_of_turn
from foretrace.engines.prompts import decode_after
from foretrace.engines.token_bytes import TokenBytes
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.gguf import GGUFTokenizer, load_llama
from foretrace.hmm import HMM

pytestmark = pytest.mark.llama_cpp

TEXTS = ["Hello, world!", " naïve 漢字 (\N{GRINNING FACE})?\n\tYes.", "a<|im_end|>b", ""]


def test_the_fingerprint_is_that_of_the_hmm(tokenizer: Any, hmm: HMM) -> None:
    assert tokenizer.fingerprint == hmm.config.tokenizer_fingerprint
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert {0, 2} <= set(tokenizer.end_token_ids)


def test_texts_and_tokens_agree(tokenizer: Any) -> None:
    token_bytes = TokenBytes.of(tokenizer).tokens
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text.replace("<|im_end|>", "")
        assert b"".join(token_bytes[token] for token in ids).decode() == tokenizer.decode(ids)
    assert tokenizer(TEXTS[2]).input_ids[1] == 2
    assert decode_after(tokenizer, [28120], [28]) == ","


def test_tokens_are_those_of_transformers(tokenizer: Any, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        assert tokenizer(text).input_ids == expected(text).input_ids
    assert tokenizer.get_vocab() == expected.get_vocab()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert encode_chat(tokenizer, messages) == encode_chat(expected, messages)


def test_a_chat_ends_at_the_end_of_a_turn(tokenizer: Any) -> None:
    assert end_of_turn(tokenizer) == 2


def test_a_template_that_refuses_is_an_error(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = {"tokenizer.chat_template": "{{ raise_exception('no system message') }}"}
    monkeypatch.setattr(tokenizer.llm, "metadata", refusing)
    with pytest.raises(InvalidInputError, match="no system message"):
        encode_chat(tokenizer, [{"role": "user", "content": "Hello"}])


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="There is no file"):
        load_llama(str(tmp_path / "no.gguf"))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidFileError, match=r"damaged\.gguf cannot be loaded"):
        GGUFTokenizer.from_file(str(tmp_path / "damaged.gguf"))
