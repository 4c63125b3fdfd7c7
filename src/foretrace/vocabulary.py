"""A short name for a tokenizer's vocabulary, so that mismatches are caught before they do harm."""

import hashlib
from collections.abc import Mapping
from typing import Any

from foretrace.errors import TokenizerMismatchError


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Name a vocabulary by its content: `fingerprint(tokenizer.get_vocab())`.

    Two vocabularies share a fingerprint if and only if they map the same tokens to the same ids,
    in whatever order they list them.
    """
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items(), key=lambda entry: entry[::-1]):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (index, len(encoded)))  # the length keeps entries apart
        digest.update(encoded)
    return f"sha256:{digest.hexdigest()}"


def described(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Say what an attribute has to know of a tokenizer: how many ids there are, and whose."""
    return {
        "vocab_size": max(vocabulary.values()) + 1,
        "tokenizer_fingerprint": fingerprint(vocabulary),
    }


def require_same_fingerprint(name: str, found: str | None, expected: str | None) -> None:
    """Raise unless both fingerprints agree; an unknown one (`None`) agrees with everything."""
    if found is None or expected is None or found == expected:
        return
    raise TokenizerMismatchError(
        f"{name} was made with another tokenizer than the one in use: its fingerprint is "
        f"{found}, the tokenizer's is {expected}. Token ids would mean different words. "
        f"Use the tokenizer it was made with, or make it anew for this tokenizer."
    )
