"""Ways to have required words in a text: lookahead, what is left without it, and other methods."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from importlib.util import find_spec
from itertools import combinations
from operator import and_
from pathlib import Path
from typing import Any, NamedTuple

import foretrace as ft
from foretrace.chat import as_messages, encode_chat
from foretrace.engines.prompts import Goals, decode_after
from foretrace.engines.transformers import generate_tokens, stop_tokens, unigram_hmm
from foretrace.engines.transformers.calibration import SteeredRuns
from keyword_texts import missing_words

EXAMPLES = Path(__file__).parent.parent / "examples"
LEVEL = "medium"
TOP_P = 0.9
Rows = list[list[int]]
"""Token ids of the texts of each pair, one after the other."""


class Pair(NamedTuple):
    """Required words, and the opening that a text continues."""

    words: tuple[str, ...]
    opening: str


@dataclass(frozen=True)
class Batch:
    """Pairs whose texts are written together."""

    pairs: tuple[Pair, ...]
    copies: int
    length: int
    """The largest number of tokens."""
    seed: int


@dataclass(frozen=True, eq=False)
class Writer:
    """Writes the texts of a batch by all methods. The HMM is of the language model."""

    lm: Any
    tokenizer: Any
    hmm: ft.HMM

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end a text or a turn."""
        return stop_tokens(self.lm.generation_config, self.hmm.config.eos_token_ids)

    @cached_property
    def frequencies(self) -> ft.HMM:
        """The frequencies of tokens: an HMM with one state."""
        return unigram_hmm(self.lm, self.tokenizer)

    @cached_property
    def positive(self) -> ft.Attribute:
        """The attribute that is wanted together with the words."""
        return ft.AttributeStore(EXAMPLES / "attributes")["positive"]

    def openings(self, batch: Batch) -> list[list[int]]:
        """Return the openings as token ids."""
        return [self.tokenizer(pair.opening).input_ids for pair in batch.pairs]

    def instructions(self, batch: Batch, kind: str = "") -> list[list[int]]:
        """Return chats that ask for the words, with answers that begin with the openings."""
        return [
            [
                *encode_chat(
                    self.tokenizer,
                    as_messages(f"Write a {kind}sentence with the words {', '.join(pair.words)}."),
                ),
                *opening,
            ]
            for pair, opening in zip(batch.pairs, self.openings(batch), strict=True)
        ]

    def draw(self, batch: Batch, prompts: Rows, goals: Goals) -> Rows:
        """Continue prompts, at top-p 0.9."""
        runs = SteeredRuns(
            self.lm,
            prompts,
            ends=self.ends,
            copies=batch.copies,
            max_new_tokens=batch.length,
            top_p=TOP_P,
            seed=batch.seed,
        )
        return [row.tokens for row in runs.draw(goals)]


@lru_cache(maxsize=1)  # for the next method: tables of five words take gigabytes
def compile_goals(
    writer: Writer, batch: Batch, horizon: int, *, positive: bool = False
) -> list[ft.CompiledGoal]:
    """Compile the words of each pair, with a positive text if that is wanted."""
    return required_goals(writer, batch, ft.Compiler(writer.hmm, horizon), positive=positive)


def required_goals(
    writer: Writer, batch: Batch, compiler: ft.Compiler, *, positive: bool = False
) -> list[ft.CompiledGoal]:
    """Compile the words of each pair with a compiler."""
    wanted = [ft.Goal(writer.positive, level=LEVEL)] if positive else []
    return [
        compiler.compile([*wanted, ft.Goal(require(writer, pair.words))]) for pair in batch.pairs
    ]


@lru_cache(maxsize=100)
def require(writer: Writer, words: tuple[str, ...]) -> ft.Attribute:
    """Return that a text has all words."""
    return reduce(
        and_,
        (ft.contains(word, writer.tokenizer, whole_word=True, ignore_case=True) for word in words),
    )


@lru_cache(maxsize=1)
def bare(writer: Writer, batch: Batch) -> Rows:
    """Continue the openings."""
    return writer.draw(batch, writer.openings(batch), None)


def forced(writer: Writer, batch: Batch) -> Rows:
    """Continue the openings, and append the missing words where the tokens run out."""
    rows, openings = bare(writer, batch), writer.openings(batch)
    texts = []
    for number, row in enumerate(rows):
        pair, opening = batch.pairs[number // batch.copies], openings[number // batch.copies]
        kept = [token for token in row if token not in writer.ends]
        missing = missing_words(decode_after(writer.tokenizer, opening, kept), pair.words)
        added = [token for word in missing for token in writer.tokenizer(f" {word}").input_ids]
        texts.append([*kept[: batch.length - len(added)], *added])
    return texts


def _look_ahead(writer: Writer, batch: Batch, prompts: Rows) -> Rows:
    return writer.draw(batch, prompts, compile_goals(writer, batch, batch.length - 1))


def lookahead(writer: Writer, batch: Batch) -> Rows:
    """Look ahead to the end of the text."""
    return _look_ahead(writer, batch, writer.openings(batch))


def few_ahead(horizon: int) -> Callable[[Writer, Batch], Rows]:
    """Look ahead by a few tokens: the words must come within them."""

    def write(writer: Writer, batch: Batch) -> Rows:
        goals = compile_goals(writer, batch, horizon)
        return writer.draw(batch, writer.openings(batch), goals)

    return write


def frequencies(writer: Writer, batch: Batch) -> Rows:
    """Keep the guarantee, and expect words by the frequencies of tokens alone."""
    compiler = ft.Compiler(writer.frequencies, batch.length - 1)
    goals = required_goals(writer, batch, compiler)
    return writer.draw(batch, writer.openings(batch), goals)


def prompting(writer: Writer, batch: Batch) -> Rows:
    """Ask for the words."""
    return writer.draw(batch, writer.instructions(batch), None)


def prompting_and_lookahead(writer: Writer, batch: Batch) -> Rows:
    """Ask for the words, and look ahead to the end of the text."""
    return _look_ahead(writer, batch, writer.instructions(batch))


def positive_lookahead(writer: Writer, batch: Batch) -> Rows:
    """Look ahead for the words and for a positive text."""
    goals = compile_goals(writer, batch, batch.length - 1, positive=True)
    return writer.draw(batch, writer.openings(batch), goals)


def positive_prompting(writer: Writer, batch: Batch) -> Rows:
    """Ask for the words and for a positive sentence."""
    return writer.draw(batch, writer.instructions(batch, "positive "), None)


def positive_both(writer: Writer, batch: Batch) -> Rows:
    """Ask for the words and a positive sentence, and look ahead for both."""
    goals = compile_goals(writer, batch, batch.length - 1, positive=True)
    return writer.draw(batch, writer.instructions(batch, "positive "), goals)


def grammar(writer: Writer, batch: Batch) -> Rows:
    """Allow only tokens after which a text with the words is possible, by xgrammar."""
    import torch
    import xgrammar as xgr  # type: ignore[import-untyped, import-not-found, unused-ignore]

    vocabulary = xgr.TokenizerInfo.from_huggingface(
        writer.tokenizer, vocab_size=writer.lm.config.vocab_size, stop_token_ids=writer.ends
    )
    compiler = xgr.GrammarCompiler(vocabulary)
    compiled = [compiler.compile_grammar(words_grammar(pair.words)) for pair in batch.pairs]
    torch.manual_seed(batch.seed)
    return generate_tokens(
        writer.lm,
        writer.tokenizer,
        [row for row in writer.openings(batch) for _ in range(batch.copies)],
        max_new_tokens=batch.length,
        eos_token_id=writer.ends,
        top_p=TOP_P,
        logits_processor=[
            xgr.contrib.hf.LogitsProcessor([one for one in compiled for _ in range(batch.copies)])
        ],
    )


def words_grammar(words: Sequence[str]) -> str:
    """Return the grammar of texts that have all words, as whole words in any order and case.

    There is a rule for every set of words that are missing.
    """
    rules = []
    numbers = range(len(words))
    for size in range(len(words), 0, -1):
        for missing in combinations(numbers, size):
            found = [
                f"{_any_case(words[one])} {_rule(set(missing) - {one}, boundary=True)}"
                for one in missing
            ]
            rules.append(
                f"{_rule(missing)} ::= other {_rule(missing)} | letters other {_rule(missing)} | "
                + " | ".join(found)
            )
            rules.append(f"{_rule(missing, boundary=True)} ::= other {_rule(missing)}")
    rules += [
        f'{_rule((), boundary=True)} ::= "" | other {_rule(())}',
        f'{_rule(())} ::= "" | any {_rule(())}',
        f"root ::= {_rule(numbers)}",
        "letters ::= [A-Za-z0-9_]+",
        "other ::= [^A-Za-z0-9_]",
        "any ::= [A-Za-z0-9_] | [^A-Za-z0-9_]",
    ]
    return "\n".join(rules)


def _rule(missing: Iterable[int], *, boundary: bool = False) -> str:
    """Return the name of the rule for a text in which these words are missing."""
    kind = "after" if boundary else "text"
    return "_".join([kind, *map(str, sorted(missing))])


def _any_case(word: str) -> str:
    """Return a word's letters in both cases."""
    return " ".join(f"[{letter.upper()}{letter.lower()}]" for letter in word)


LOOKAHEAD, PROMPTING, BOTH = "lookahead", "prompting", "prompting and lookahead"
BOTH_POSITIVE = f"{BOTH}, positive"
METHODS: Mapping[str, Callable[[Writer, Batch], Rows]] = {  # neighbours share goals and texts
    "bare": bare,
    "forced at the end": forced,
    LOOKAHEAD: lookahead,
    BOTH: prompting_and_lookahead,
    PROMPTING: prompting,
    "token frequencies": frequencies,
    "3 tokens of lookahead": few_ahead(3),
    "the next token alone": few_ahead(0),
    "grammar": grammar,
    "lookahead, positive": positive_lookahead,
    BOTH_POSITIVE: positive_both,
    "prompting, positive": positive_prompting,
}


def available_methods() -> list[str]:
    """Return the names of the methods whose packages are installed."""
    return [name for name in METHODS if name != "grammar" or find_spec("xgrammar") is not None]
