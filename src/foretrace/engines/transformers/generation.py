"""Generate steered or unsteered texts from prompts in one call."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import LogitsProcessorList

from foretrace.chat import Prompt
from foretrace.engines.prompts import (
    Goals,
    common_hmm,
    decode_after,
    encode_prompts,
    hmm_ends,
    turn_ends,
)
from foretrace.engines.transformers.batch import cut_at_end, pad_left
from foretrace.engines.transformers.processor import SteeringProcessor
from foretrace.vocabulary import fingerprint, require_same_fingerprint

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def generate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    *,
    goal: Goals = None,
    max_new_tokens: int = 20,
    **options: Any,
) -> list[str]:
    """Generate continuations of texts, or answers to chats, steered toward a goal.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer.
        prompts: A list. Each prompt is a text to continue (an empty one begins a new text), or a
            chat, which is answered: a list of messages, `{"role": ..., "content": ...}`. A chat
            goes through the tokenizer's chat template.
        goal: A compiled goal, or a goal or None for each prompt.
        max_new_tokens: Tokens to generate at most.
        **options: Options of `model.generate`. Sampling is on, without transformers' default top-k
            of 50, unless the options say otherwise.

    Returns:
        The continuations, without the prompts. A text ends at an end-of-text token of the model or
        of the HMM, and an answer also at the chat template's end of a turn.

    Raises:
        InvalidInputError: The prompts are not a list, the goals do not fit them, or there is a chat
            and the tokenizer has no chat template.
        TokenizerMismatchError: The HMM was made with another tokenizer.

    Example:
        >>> goal = ft.Compiler(hmm, horizon=8).compile(ft.Goal(attribute, strength=2.0))
        >>> texts = ft.generate(model, tokenizer, ["hello", ""], goal=goal, max_new_tokens=4)
        >>> len(texts)
        2
        >>> chat = [{"role": "user", "content": "hello"}]
        >>> answers = ft.generate(model, tokenizer, [chat], goal=goal, max_new_tokens=4)
    """
    encoded = encode_prompts(tokenizer, prompts, goal)
    if "eos_token_id" not in options:
        config = options.get("generation_config") or model.generation_config
        options["eos_token_id"] = stop_tokens(
            config, [*hmm_ends(goal), *turn_ends(tokenizer, prompts)]
        )
    generated = generate_tokens(
        model, tokenizer, encoded, goal=goal, max_new_tokens=max_new_tokens, **options
    )
    copies = len(generated) // len(encoded)
    return [
        decode_after(tokenizer, encoded[row // copies], tokens)
        for row, tokens in enumerate(generated)
    ]


def generate_tokens(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Sequence[int]],
    *,
    goal: Goals = None,
    max_new_tokens: int = 20,
    on_price: Callable[[Tensor], None] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Generate continuations of token ids, as `generate` does for texts.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer.
        prompts: Token ids of each prompt, at least one.
        goal: A compiled goal, or a goal or None for each prompt.
        max_new_tokens: Tokens to generate at most.
        on_price: Called at every step with the price of every row; see `SteeringProcessor`.
        **options: Options of `model.generate`.

    Returns:
        The new token ids of each row, with the end-of-text token.

    Raises:
        InvalidInputError: The goals do not fit the prompts.
        TokenizerMismatchError: The HMM was made with another tokenizer.

    Example:
        >>> from foretrace.engines.transformers import generate_tokens
        >>> rows = generate_tokens(model, tokenizer, [[5, 6], [7]], max_new_tokens=3)
        >>> max(map(len, rows)) <= 3
        True
    """
    config = options.get("generation_config") or model.generation_config
    ends = stop_tokens(config, hmm_ends(goal))
    if "eos_token_id" in options:  # None: no token ends a text
        ends = _as_list(options.pop("eos_token_id"))
    pad = next((token for token in (tokenizer.pad_token_id, *ends) if token is not None), 0)
    ids, mask = pad_left(prompts, pad)
    hmm = common_hmm(goal)
    if hmm is not None:
        known = hmm.config.tokenizer_fingerprint
        require_same_fingerprint("The HMM", known, fingerprint(tokenizer.get_vocab()))
    processor = SteeringProcessor(
        goal, prompt_mask=mask, max_new_tokens=max_new_tokens, stop_ids=ends, on_price=on_price
    )
    processors = [processor, *(options.pop("logits_processor", None) or [])]
    settings = {"do_sample": True, "pad_token_id": pad, "eos_token_id": ends or None} | options
    if settings["do_sample"]:
        settings.setdefault("top_k", 0)
    output: Tensor = model.generate(  # type: ignore[operator]
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        logits_processor=LogitsProcessorList(processors),
        **settings,
    )
    return [cut_at_end(row, ends) for row in output[:, mask.shape[1] :].tolist()]


def stop_tokens(config: "GenerationConfig", ends: Sequence[int]) -> list[int]:
    """Return the tokens that end a text: first the model's, then an HMM's.

    Args:
        config: The model's generation config.
        ends: The HMM's end-of-text tokens.

    Returns:
        Token ids without duplicates.

    Example:
        >>> from foretrace.engines.transformers import stop_tokens
        >>> 7 in stop_tokens(model.generation_config, [7])
        True
    """
    return list(dict.fromkeys([*_as_list(config.eos_token_id), *ends]))


def _as_list(tokens: int | list[int] | None) -> list[int]:
    return [tokens] if isinstance(tokens, int) else list(tokens or [])
