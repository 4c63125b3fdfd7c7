"""A fingerprint depends on the content of a vocabulary, not on its order."""

import pytest

import foretrace
from foretrace.errors import TokenizerMismatchError
from foretrace.vocabulary import require_same_fingerprint


def test_order_does_not_matter_but_content_does() -> None:
    fingerprint = foretrace.fingerprint
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0})
    distinct = [{"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0}, {"ab": 0}, {"a": 0, "b": 2}, {}]
    assert len({fingerprint(vocabulary) for vocabulary in distinct}) == len(distinct)


def test_the_order_of_tokens_with_equal_ids_does_not_matter() -> None:
    assert foretrace.fingerprint({"a": 0, "b": 0}) == foretrace.fingerprint({"b": 0, "a": 0})


def test_tokens_that_are_not_valid_utf8() -> None:
    assert foretrace.fingerprint({"\ud800": 0, "é ": 1}).startswith("sha256:")


def test_an_unknown_fingerprint_matches_every_other() -> None:
    require_same_fingerprint("It", None, "x")
    require_same_fingerprint("It", "x", None)
    require_same_fingerprint("It", "x", "x")
    with pytest.raises(TokenizerMismatchError, match="It was made with another tokenizer"):
        require_same_fingerprint("It", "x", "y")
