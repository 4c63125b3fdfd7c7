"""Fingerprints of tokenizer vocabularies, to detect files made with a different tokenizer."""

import hashlib
from collections.abc import Mapping
from typing import Any

from foretrace.errors import TokenizerMismatchError


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Compute a hash of a tokenizer's vocabulary.

    Two vocabularies have the same fingerprint if and only if they map the same tokens to the same
    ids. The order of the entries does not matter.

    Args:
        vocabulary: Ids by token, as `tokenizer.get_vocab()` returns them.

    Returns:
        The SHA-256 of the content, as `"sha256:<hexadecimal digits>"`.

    Example:
        >>> ft.fingerprint({"a": 0, "b": 1}) == ft.fingerprint({"b": 1, "a": 0})
        True
        >>> ft.fingerprint({"a": 0})[:15]
        'sha256:7de71e07'
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items(), key=lambda entry: entry[::-1]):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (token_id, len(encoded)))  # the length separates the entries
        digest.update(encoded)
    return f"sha256:{digest.hexdigest()}"


def tokenizer_settings(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of `Attribute.fit` that depend on the tokenizer."""
    return {
        "vocab_size": max(vocabulary.values()) + 1,
        "tokenizer_fingerprint": fingerprint(vocabulary),
    }


def require_same_fingerprint(name: str, actual: str | None, expected: str | None) -> None:
    """Raise unless both fingerprints are equal; an unknown one (`None`) equals every other."""
    if actual is None or expected is None or actual == expected:
        return
    raise TokenizerMismatchError(
        f"{name} was made with another tokenizer than the one in use: its fingerprint is "
        f"{actual}, the tokenizer's is {expected}. Token ids would mean different words. "
        f"Use the tokenizer it was made with, or make it again with this tokenizer."
    )
