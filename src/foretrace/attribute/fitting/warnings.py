"""Warnings about a fit: texts that make its AUC too high, or that teach it something else."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from foretrace.attribute.fitting.candidate import Candidate, auc, positives
from foretrace.attribute.fitting.examples import Examples, Indices
from foretrace.attribute.fitting.split import Split
from foretrace.attribute.fitting.surface import Surface, is_mark, predict
from foretrace.attribute.fitting.words import Decoder, function_words, group_terms, normalize

MIN_TEXTS = 200
MIN_RARER_TEXTS = 50
MAX_NEAR_DUPLICATES = 0.1  # of all texts
MAX_LEAKED = 0.05  # of the held-out texts
HIGH_AUC = 0.99
MAX_REPEATED = 0.95  # of the token pairs of held-out texts
MAX_SURFACE = 0.6  # of what the AUC of the fit has above chance
STANDARD_ERRORS = 4.0  # above chance: a smaller AUC of a feature may be chance
NUM_STRONGEST = 50
MAX_FUNCTION_WORDS = 2
MIN_COMMON = 0.25  # a token in more of the texts of both sides is a function word
MAX_UNSEEN = 0.15  # of the prompts' tokens, more than of the held-out texts' tokens


def find_warnings(
    split: Split,
    candidate: Candidate,
    surface: Surface,
    tokenizer: Decoder | None = None,
    prompts: csr_array | None = None,
) -> list[str]:
    """Return sentences on each fault that is found: what, why it matters, and what to do.

    `surface` describes the texts to fit to, and `prompts` (m, V) has the token counts of prompts.
    Without a tokenizer, tokens are not looked up in lists of words.
    """
    return [
        *_few_texts(split),
        *_near_duplicates(split),
        *_repeated_phrases(split, candidate),
        *_telling_surface(split.fitting, candidate, surface),
        *_function_words(split.fitting, candidate, tokenizer),
        *_group_terms(candidate, tokenizer),
        *_unknown_prompts(split, prompts),
    ]


def _few_texts(split: Split) -> Iterator[str]:
    positive = positives(split.fitting.scores)
    rarer = 0
    if positive is not None:
        groups = split.fitting.groups
        rarer = min(len(np.unique(groups[side])) for side in (positive, ~positive))
    if split.num_texts < MIN_TEXTS:
        yield (
            f"There are {split.num_texts} texts, fewer than {MIN_TEXTS}: the rewards and the AUC "
            f"depend on chance. Add texts; some thousands are good."
        )
    elif rarer < MIN_RARER_TEXTS:
        yield (
            f"Only {rarer} fitted texts are on the rarer side, fewer than {MIN_RARER_TEXTS}: what "
            f"they have in common may be chance. Add texts of this side."
        )


def _near_duplicates(split: Split) -> Iterator[str]:
    held_out = split.held_out.num_groups
    found = f"{split.near_duplicates:,} of {split.num_texts:,} texts are near duplicates of others"
    leaked = f"{split.leaked:,} of {held_out:,} held-out texts are near duplicates of fitted texts"
    if split.leaked > MAX_LEAKED * held_out and split.given:
        yield f"{leaked}: the AUC is too high for new texts. Remove them from one side."
    elif split.leaked > MAX_LEAKED * held_out:
        yield (
            f"{found}, too many to hold them out together: {leaked}. The AUC is too high for new "
            f"texts. Measure it on texts of another origin, or add texts that differ."
        )
    elif split.near_duplicates > MAX_NEAR_DUPLICATES * split.num_texts:
        together = "" if split.given else "; they were held out together"
        yield (
            f"{found}{together}. Their wording decides more than it should, since every copy "
            f"counts. Keep one of each, or add texts that differ."
        )


def _repeated_phrases(split: Split, candidate: Candidate) -> Iterator[str]:
    if (candidate.auc or 0.0) < HIGH_AUC or split.repeated_phrases < MAX_REPEATED:
        return
    yield (
        f"The AUC of {candidate.auc:.4f} says little about other texts: all texts are made of few "
        f"phrases, and {split.repeated_phrases:.0%} of the token pairs of held-out texts occur in "
        f"fitted texts too. Add texts that were written independently of each other."
    )


def _telling_surface(examples: Examples, candidate: Candidate, surface: Surface) -> Iterator[str]:
    positive = positives(examples.scores)
    if positive is None or candidate.auc is None:
        return
    error = np.sqrt((1 / positive.sum() + 1 / (~positive).sum()) / 12)
    least = 0.5 + max(MAX_SURFACE * (candidate.auc - 0.5), STANDARD_ERRORS * error)
    for name, cells in surface.items():
        rank = auc(predict(cells, examples), examples.scores)
        if rank is not None and rank > least:
            yield (
                f"{name[0].upper()}{name[1:]} alone ranks the texts with an AUC of {rank:.2f}, and "
                f"the fit with {candidate.auc:.2f}: the fit may have learned that instead of the "
                f"attribute. Choose texts of both sides that do not differ in it."
            )


def _function_words(
    examples: Examples, candidate: Candidate, tokenizer: Decoder | None
) -> Iterator[str]:
    tokens = _strongest(candidate, 0.25)
    chosen = _is_common(examples, tokens)
    shown = [f"{token}" for token in tokens.tolist()]
    if tokenizer is not None:
        spelled = [str(tokenizer.decode([token])) for token in tokens.tolist()]
        chosen |= np.array(_is_function_word(spelled), dtype=bool)
        shown = [repr(text) for text in spelled]
    found = [text for text, is_chosen in zip(shown, chosen, strict=True) if is_chosen]
    if len(found) > MAX_FUNCTION_WORDS:
        yield (
            f"{len(found)} of the {len(tokens)} strongest tokens are function words or "
            f"punctuation: {', '.join(found[:10])}{', ...' if len(found) > 10 else ''}. Steering "
            f"changes how often they occur, whatever the text is about. Unless they decide by "
            f"themselves, list them in --keep."
        )


def _is_function_word(tokens: list[str]) -> list[bool]:
    """Return which tokens are function words or punctuation.

    If words begin with a space, a token without one is a part of a word, or the first of a text.
    """
    spaced = any(text.startswith(" ") for text in tokens)
    words = set(function_words())
    return [
        is_mark(text) or (normalize(text) in words and (text[0] == " " or not spaced))
        for text in tokens
    ]


def _is_common(examples: Examples, tokens: Indices) -> NDArray[np.bool_]:
    """Return which tokens are in many texts with the attribute and in many without it."""
    positive = positives(examples.scores)
    if positive is None:
        return np.zeros(len(tokens), dtype=bool)
    present = examples.counts[:, tokens] > 0
    shares = [present[np.flatnonzero(side)].mean(0) for side in (positive, ~positive)]
    return np.asarray(np.minimum(*shares) > MIN_COMMON)


def _group_terms(candidate: Candidate, tokenizer: Decoder | None) -> Iterator[str]:
    if tokenizer is None:
        return
    words = {normalize(str(tokenizer.decode([token]))) for token in _strongest(candidate).tolist()}
    if terms := sorted(words & set(group_terms())):
        yield (
            f"Terms for groups of people are among the {NUM_STRONGEST} strongest tokens: "
            f"{', '.join(terms)}. Steering changes how often they occur. To fit the attribute "
            f"without them, use --keep groups."
        )


def _strongest(candidate: Candidate, share: float = 1.0) -> Indices:
    """Return the tokens of largest reward or weight, at most a share of all, strongest first."""
    if candidate.evidence:
        tokens, strengths = candidate.evidence[0].tokens, candidate.evidence[0].rewards.abs()
    else:
        tokens, strengths = candidate.terms.tokens, candidate.terms.log_weights.abs().amax(0)
    order = strengths.argsort(descending=True, stable=True)
    return tokens[order[: min(NUM_STRONGEST, int(share * len(tokens)))]].long().numpy()


def _unknown_prompts(split: Split, prompts: csr_array | None) -> Iterator[str]:
    if prompts is None:
        return
    known = np.zeros(prompts.shape[1], dtype=bool)
    known[split.fitting.counts.indices] = True
    of_prompts, of_texts = (
        float(counts.data[~known[counts.indices]].sum() / counts.sum())
        for counts in (prompts, split.held_out.counts)
    )
    if of_prompts > of_texts + MAX_UNSEEN:
        yield (
            f"{of_prompts:.0%} of the tokens of the prompts occur in no fitted text, and "
            f"{of_texts:.0%} of the tokens of held-out texts: the attribute has no rewards for "
            f"what the prompts are about. Add texts like those that the LM writes for them."
        )
