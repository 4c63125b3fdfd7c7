"""Words that must not decide: find their tokens, and list neutral terms for groups of people."""

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Protocol

GROUPS = "groups"  # the name of the list of group terms


class Decoder(Protocol):
    """The methods of a tokenizer that are used here; tokenizers of transformers have them."""

    def decode(self, token_ids: list[int], /) -> str | list[str]:
        """Return the text of tokens."""

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token."""


def word_tokens(words: Iterable[str], tokenizer: Decoder) -> list[int]:
    """Find the tokens that spell one of these words, with or without a space before it.

    Capitalisation does not matter. Other forms of a word, such as the plural, count as other words.
    A word that the tokenizer splits has no token: its pieces belong to other words too.

    Args:
        words: The words.
        tokenizer: A tokenizer of transformers.

    Returns:
        The token ids, ascending: `FitConfig.keep` takes them.

    Example:
        >>> from foretrace.attribute import word_tokens
        >>> [tokenizer.decode([token]) for token in word_tokens(["A"], tokenizer)]
        ['A', 'a', ' a']
    """
    spelled = {normalize(word) for word in words} - {""}
    return sorted(
        token
        for token in set(tokenizer.get_vocab().values())
        if normalize(str(tokenizer.decode([token]))) in spelled
    )


def normalize(text: str) -> str:
    """Remove the spaces around a text, and capitalisation."""
    return text.strip().casefold()


def parse_words(content: str) -> list[str]:
    """Return the words of a file: one per line, without blank lines and comments (#)."""
    lines: Sequence[str] = [line.strip() for line in content.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def group_terms() -> list[str]:
    """Return neutral terms for groups of people, such as *black*, *gay*, *muslim* and *women*.

    They cover ethnicity, nationality, religion, gender, orientation, disability and age.

    Returns:
        The terms, in lower case.

    Example:
        >>> from foretrace.attribute import group_terms
        >>> "women" in group_terms()
        True
    """
    return _read_list("group_terms.txt")


def function_words() -> list[str]:
    """Return English words that occur in texts of every kind, such as *the*, *am* and *which*."""
    return _read_list("function_words.txt")


def _read_list(name: str) -> list[str]:
    return parse_words(files("foretrace.attribute.fitting").joinpath(name).read_text("utf-8"))
