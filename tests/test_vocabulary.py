"""A fingerprint names a vocabulary by its content alone."""

import pytest

import foretrace
from foretrace.errors import TokenizerMismatchError
from foretrace.vocabulary import require_same_fingerprint


def test_order_does_not_matter_but_content_does() -> None:
    fingerprint = foretrace.fingerprint
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0})
    distinct = [{"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0}, {"ab": 0}, {"a": 0, "b": 2}, {}]
    assert len({fingerprint(vocabulary) for vocabulary in distinct}) == len(distinct)


def test_tokens_that_share_an_id() -> None:
    assert foretrace.fingerprint({"a": 0, "b": 0}) == foretrace.fingerprint({"b": 0, "a": 0})


def test_any_string_can_be_a_token() -> None:
    assert foretrace.fingerprint({"\ud800": 0, "é ": 1}).startswith("sha256:")


def test_an_unknown_fingerprint_agrees_with_all() -> None:
    require_same_fingerprint("It", None, "x")
    require_same_fingerprint("It", "x", None)
    require_same_fingerprint("It", "x", "x")
    with pytest.raises(TokenizerMismatchError, match="It was made with another tokenizer"):
        require_same_fingerprint("It", "x", "y")
