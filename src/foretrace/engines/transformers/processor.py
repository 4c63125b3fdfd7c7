"""Steering in transformers: a logits processor for `generate`, and one line for the rest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from foretrace.errors import InvalidInputError
from foretrace.steering import Goal, PrefixTracker, Request
from foretrace.vocabulary import fingerprint, require_same_fingerprint

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

Goals = Sequence[Goal] | Sequence[Sequence[Goal]]


class SteeringProcessor(LogitsProcessor):
    """Steers what `model.generate` writes: sampling, greedy, beams, batches padded on the left.

    `goals` are those of every row, or a sequence of them for each prompt, which may be empty. One
    object serves any number of calls with prompts of the same shape.
    """

    def __init__(
        self,
        goals: Goals,
        *,
        prompt_mask: Tensor,
        max_new_tokens: int,
        ends: Sequence[int] = (),
    ) -> None:
        """Make it for prompts; `ends` are the tokens that end a text, beside the HMM's."""
        self.prompt_mask = prompt_mask.bool().cpu()  # (prompts, T), False where padded
        self.goals = _for_each_prompt(goals, len(prompt_mask))
        self.max_new_tokens, self.ends = max_new_tokens, tuple(ends)
        hmms = {id(goal.lookahead.hmm): goal.lookahead.hmm for own in self.goals for goal in own}
        if len(hmms) > 1:
            raise InvalidInputError(
                "The goals of a batch must be of one and the same HMM object: load it once, and "
                "make every Lookahead with it."
            )
        self.matching = PrefixTracker(*hmms.values()) if hmms else None
        self.prompts: Tensor | None = None
        self.requests: list[Request] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Reweight the next token of each row: (rows, length) ids, (rows, V) logits."""
        if self.matching is None:
            return scores
        count, length = self.prompt_mask.shape
        if len(input_ids) % count or input_ids.shape[1] < length:
            raise InvalidInputError(
                f"The processor was made for {count} prompts of {length} tokens, but gets ids of "
                f"shape {tuple(input_ids.shape)}. Make one for these prompts."
            )
        copies = len(input_ids) // count  # beams, or sequences to return
        ids = input_ids.cpu()
        prompts = ids[::copies, :length]
        if self.prompts is None or not torch.equal(prompts, self.prompts):
            self.prompts, self.requests = prompts, self._requests(prompts)
        rows = [request for request in self.requests for _ in range(copies)]
        self.matching.step(rows, ids[:, length:].tolist())
        return self.matching.reweight(scores)

    def _requests(self, prompts: Tensor) -> list[Request]:
        return [
            Request(own, tuple(prompt[mask].tolist()), self.max_new_tokens, ends=self.ends)
            for own, prompt, mask in zip(self.goals, prompts, self.prompt_mask, strict=True)
        ]


def _for_each_prompt(goals: Goals, count: int) -> list[tuple[Goal, ...]]:
    shared = [goal for goal in goals if isinstance(goal, Goal)]
    if len(shared) == len(goals):
        return [tuple(shared)] * count
    own = [tuple(each) for each in goals if not isinstance(each, Goal)]
    if shared or len(own) != count:
        raise InvalidInputError(
            f"Give goals for all rows, [goal, ...], or for each of the {count} prompts its own, "
            f"[[goal, ...], [], ...]; these are {len(goals)}."
        )
    return own


def generate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    *,
    goal: Goal | Goals | None = None,
    max_new_tokens: int = 20,
    **options: Any,
) -> list[str]:
    """Write continuations of the prompts, steered: their texts, without the prompts.

    Options go to `model.generate`. Sampling is on, without transformers' own top-k of 50, unless
    they say otherwise. A text ends where the model or the HMM says so. An empty prompt begins one.
    """
    encoded = encode_prompts(tokenizer, prompts, goal)
    written = generate_tokens(
        model, tokenizer, encoded, goal=goal, max_new_tokens=max_new_tokens, **options
    )
    copies = len(written) // len(encoded)
    return [
        decode_after(tokenizer, encoded[row // copies], tokens)
        for row, tokens in enumerate(written)
    ]


def decode_after(
    tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], tokens: Sequence[int]
) -> str:
    """Turn tokens into the text that they add to a prompt: some decoders drop a first space."""
    settings = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    lead, whole = (
        str(tokenizer.decode(ids, **settings)) for ids in (list(prompt), [*prompt, *tokens])
    )
    return whole.removeprefix(lead)


def encode_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    goal: Goal | Goals | None = None,
) -> list[list[int]]:
    """Turn prompts into token ids; what would have none begins a text, as the HMM knows it."""
    beginning = [*_ends(goal), tokenizer.bos_token_id, tokenizer.eos_token_id]
    start = next(([token] for token in beginning if token is not None), [])
    encoded = [ids or start for ids in tokenizer(list(prompts)).input_ids]
    if not all(encoded):
        raise InvalidInputError(
            "A prompt is empty, and the tokenizer has no token to begin a text. Write something."
        )
    return encoded


def generate_tokens(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Sequence[int]],
    *,
    goal: Goal | Goals | None = None,
    max_new_tokens: int = 20,
    **options: Any,
) -> list[list[int]]:
    """Write continuations of token ids as `generate` does: the new ids, with the end of text."""
    goals: Goals = [goal] if isinstance(goal, Goal) else goal or []
    config = options.get("generation_config") or model.generation_config
    ends = stop_tokens(config, _ends(goal))
    if "eos_token_id" in options:  # None: nothing ends a text
        ends = _listed(options.pop("eos_token_id"))
    filler = next((each for each in (tokenizer.pad_token_id, *ends) if each is not None), 0)
    ids, mask = left_padded(prompts, filler)
    processor = SteeringProcessor(goals, prompt_mask=mask, max_new_tokens=max_new_tokens, ends=ends)
    if processor.matching is not None:
        require_same_fingerprint(
            "The HMM",
            processor.matching.steering.hmm.config.tokenizer_fingerprint,
            fingerprint(tokenizer.get_vocab()),
        )
    processors = [processor, *(options.pop("logits_processor", None) or [])]
    settings = {"do_sample": True, "pad_token_id": filler, "eos_token_id": ends or None} | options
    if settings["do_sample"]:
        settings.setdefault("top_k", 0)
    written: Tensor = model.generate(  # type: ignore[operator]
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        logits_processor=LogitsProcessorList(processors),
        **settings,
    )
    return [to_the_end(row, ends) for row in written[:, mask.shape[1] :].tolist()]


def stop_tokens(config: "GenerationConfig", ends: Sequence[int]) -> list[int]:
    """Give the tokens that end a text: the model's own, and those of an HMM."""
    return list(dict.fromkeys([*_listed(config.eos_token_id), *ends]))


def _listed(tokens: int | list[int] | None) -> list[int]:
    return [tokens] if isinstance(tokens, int) else list(tokens or [])


def _ends(goal: Goal | Goals | None) -> tuple[int, ...]:
    """Find what ends texts for the HMM of some goals; nothing if there are none."""
    goals = [goal] if isinstance(goal, Goal) else goal or []
    for each in goals:
        for one in [each] if isinstance(each, Goal) else each:
            return one.lookahead.hmm.config.eos_token_ids
    return ()


def left_padded(prompts: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Pad on the left: ids and mask, (n, longest). Not every tokenizer has a token for it."""
    longest = max(map(len, prompts))
    rows = [[filler] * (longest - len(ids)) + list(ids) for ids in prompts]
    masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(rows), torch.tensor(masks)


def placed(ids: Tensor, mask: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Give a model's inputs for ids at the end of rows padded on the left, with their positions."""
    places = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    return {name: each.to(device) for name, each in given.items()}


def to_the_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Cut off what fills a row after its end of text."""
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]
