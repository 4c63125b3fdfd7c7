"""Test the tokens of words, and the list of terms for groups of people."""

from foretrace.attribute import group_terms, word_tokens
from foretrace.attribute.fitting.words import parse_words


class Tokens:
    """A tokenizer whose vocabulary is a list."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.tokens[index] for index in token_ids)


def test_tokens_of_a_word_have_any_space_and_capitals() -> None:
    tokenizer = Tokens("gay", " gay", " Gay", "GAY", " gays", "g", " gaze", "Mus", "lim", " ")
    assert word_tokens(["Gay"], tokenizer) == [0, 1, 2, 3]
    assert word_tokens(["gay", "gays"], tokenizer) == [0, 1, 2, 3, 4]
    assert word_tokens(["muslim"], tokenizer) == []  # two tokens
    assert word_tokens(["", " "], tokenizer) == []


def test_comments_and_blank_lines_are_no_words() -> None:
    assert parse_words("# list\n\n women \r\nold\n") == ["women", "old"]


def test_group_terms_are_neutral_words() -> None:
    terms = group_terms()
    assert {"black", "white", "gay", "muslim", "jewish", "women", "deaf", "elderly"} <= set(terms)
    assert len(terms) == len(set(terms))
    assert all(term == term.strip().lower() and " " not in term for term in terms)
