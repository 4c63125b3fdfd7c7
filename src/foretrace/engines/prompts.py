"""Prompts as token ids, generated token ids as texts, and attributes of these."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from foretrace.attribute import Attribute
from foretrace.chat import Prompt, encode_chat, end_of_turn, is_chat
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal
from foretrace.steering.markers import Window

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Goals = CompiledGoal | Sequence[CompiledGoal | None] | None
"""The goal of all prompts, or a goal or None for each prompt."""


def encode_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    goal: Goals = None,
) -> list[list[int]]:
    """Encode prompts. An empty text becomes the token that begins a text.

    Args:
        tokenizer: A tokenizer.
        prompts: A list of texts and chats.
        goal: A goal whose HMM knows the token that begins a text.

    Returns:
        Token ids of each prompt, at least one.

    Raises:
        InvalidInputError: `prompts` is a single text or chat, a prompt is empty and no token begins
            a text, or there is a chat and the tokenizer has no chat template.

    Example:
        >>> from foretrace.engines.prompts import encode_prompts
        >>> [len(ids) > 0 for ids in encode_prompts(tokenizer, ["hello", ""])]
        [True, True]
    """
    if isinstance(prompts, str) or is_chat(prompts):
        raise InvalidInputError(
            "prompts must be a list of texts and chats, not one of them. Write [prompt]."
        )
    return [
        encode_chat(tokenizer, prompt)
        if is_chat(prompt)
        else tokenizer(prompt).input_ids or start_ids(tokenizer, hmm_ends(goal))
        for prompt in prompts
    ]


def start_ids(tokenizer: "PreTrainedTokenizerBase", ends: Sequence[int] = ()) -> list[int]:
    """Return the tokens that begin a text, as for an empty prompt.

    Args:
        tokenizer: A tokenizer.
        ends: The HMM's end-of-text tokens, of which the first begins texts if the tokenizer does
            not add a token to every text.

    Returns:
        Token ids, at least one.

    Raises:
        InvalidInputError: There is no such token.

    Example:
        >>> from foretrace.engines.prompts import start_ids
        >>> start_ids(tokenizer)
        [0]
    """
    candidates = [*ends, tokenizer.bos_token_id, tokenizer.eos_token_id]
    start = next(([int(token)] for token in candidates if token is not None), [])
    start = list(tokenizer("").input_ids) or start
    if not start:
        raise InvalidInputError(
            "A prompt is empty, and the tokenizer has no token to begin a text. Write something."
        )
    return start


def decode_after(
    tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], tokens: Sequence[int]
) -> str:
    """Decode tokens as the continuation of a prompt.

    The prompt matters because some decoders drop a space at the beginning.

    Args:
        tokenizer: A tokenizer.
        prompt: Token ids of the prompt.
        tokens: Token ids after it.

    Returns:
        The text that the tokens add.

    Example:
        >>> from foretrace.engines.prompts import decode_after
        >>> prompt, tokens = tokenizer("hello").input_ids, tokenizer(" there").input_ids
        >>> decode_after(tokenizer, prompt, tokens)
        ' there'
    """
    settings = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    before, whole = (
        str(tokenizer.decode(ids, **settings)) for ids in (list(prompt), [*prompt, *tokens])
    )
    return whole.removeprefix(before)


def report_text(text: str, on_text: Callable[[str], None]) -> None:
    """Report a text, unless the next token completes its last character.

    Args:
        text: The text so far.
        on_text: Called with it.
    """
    if not text.endswith("\N{REPLACEMENT CHARACTER}"):
        on_text(text)


def probabilities(
    attributes: Iterable[Attribute],
    window: Window,
    prompt: Sequence[int],
    tokens: Sequence[int],
    ends: Sequence[int],
) -> tuple[float, ...]:
    """Return the probabilities of attributes in the part of a text that a goal is about.

    Args:
        attributes: The attributes.
        window: The window of the goal.
        prompt: Token ids of the prompt.
        tokens: Token ids after it.
        ends: Tokens that end a text, which do not count.

    Returns:
        The probability of each attribute; none if the window has not begun.
    """
    span = window.span(prompt, tokens)
    if span is None:
        return ()
    counted = [token for token in tokens[span] if token not in ends]
    return tuple(float(one.probability([counted])[0]) for one in attributes)


def turn_ends(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt]) -> list[int]:
    """Return the token that ends an answer if there are chats among prompts; else none.

    Args:
        tokenizer: A tokenizer.
        prompts: A list of texts and chats.

    Returns:
        At most one token id: the special token after an answer in the chat template. Many models
        name it as an end of text too, but not all.

    Example:
        >>> from foretrace.engines.prompts import turn_ends
        >>> turn_ends(tokenizer, ["hello"])
        []
    """
    end = end_of_turn(tokenizer) if any(map(is_chat, prompts)) else None
    return [] if end is None else [end]


def hmm_ends(goal: Goals) -> tuple[int, ...]:
    """Return the end-of-text tokens of the goals' HMM; none without goals.

    Args:
        goal: The goal of all prompts, or a goal or None for each prompt.

    Returns:
        Token ids.

    Example:
        >>> from foretrace.engines.prompts import hmm_ends
        >>> hmm_ends(None)
        ()
    """
    hmm = common_hmm(goal)
    return () if hmm is None else hmm.config.eos_token_ids


def common_hmm(goal: Goals) -> HMM | None:
    """Return the HMM of all goals; None if there is no goal.

    Args:
        goal: The goal of all prompts, or a goal or None for each prompt.

    Returns:
        The HMM.

    Raises:
        InvalidInputError: The goals have several HMMs.
    """
    goals = [goal] if isinstance(goal, CompiledGoal) else goal or []
    hmms = {id(one.hmm): one.hmm for one in goals if one is not None}
    if len(hmms) > 1:
        raise InvalidInputError(
            "All goals of a batch must use the same HMM object. Compile them with one Compiler."
        )
    return next(iter(hmms.values()), None)
