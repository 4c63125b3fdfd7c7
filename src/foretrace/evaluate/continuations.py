"""Generation of many continuations: in batches, kept in a file, and resumable."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretrace import _io
from foretrace.attribute import Attribute
from foretrace.engines.prompts import Goals
from foretrace.engines.transformers import decode_after, encode_prompts
from foretrace.engines.transformers.sampler import Drawn, Sampler
from foretrace.errors import InvalidFileError
from foretrace.evaluate.plugin import NO_PLUGIN, LogitsProcessor, Plugin, Prompts
from foretrace.steering import CompiledGoal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OnProgress = Callable[[int, int], None]
NATS_DIGITS = 5  # decimals of the losses of tokens in the file
TIMED_PROMPTS, TIMED_RUNS, TIMED_TOKENS, WARM_UP_TOKENS = 2, 3, 32, 2


@dataclass(frozen=True)
class Sampling:
    """The sampling settings. The defaults follow DExperts.

    Attributes:
        continuations: The number of continuations of each prompt.
        max_new_tokens: The maximal number of generated tokens.
        top_p: The nucleus of sampling.
        seed: The seed.
        rows: The number of sequences in a batch.

    Example:
        >>> from foretrace.evaluate.continuations import Sampling
        >>> Sampling(continuations=5).max_new_tokens
        20
    """

    continuations: int = 25
    max_new_tokens: int = 20
    top_p: float = 0.9
    seed: int = 0
    rows: int = 250


@dataclass(frozen=True)
class Method:
    """A method of generation: steering, an instruction, a selection, or a plug-in.

    Attributes:
        name: The name of the method.
        goals: The goal of every prompt; None for no steering.
        prompts: The inputs of the LM, if they differ from the prompts: instructions.
        best_of: The number of candidates for each continuation.
        best_by: For each prompt, the attribute by which the best candidate is chosen.
        plugin: A method from outside foretrace. Its logits processor excludes goals.

    Example:
        >>> from foretrace.evaluate.continuations import Method
        >>> goal = ft.Compiler(hmm, horizon=4).compile(ft.Goal(attribute, strength=2.0))
        >>> Method("steered", goals=[goal, goal]).best_of
        1
    """

    name: str
    goals: Sequence[CompiledGoal] | None = None
    prompts: Sequence[str] | None = None
    best_of: int = 1
    best_by: Sequence[Attribute] = ()
    plugin: Plugin = NO_PLUGIN


class Generation(NamedTuple):
    """The continuations of a prompt.

    Attributes:
        texts: The continuations.
        nats: The negative log-probability of each under the distribution that it was sampled from.
            The mean estimates the conditional entropy.
        prices: The price of steering each, in nats per generated token; 0 without steering.
        tokens: The number of generated tokens of each.
        bare_nats: The negative log-probability of every token of each under the bare LM, as
            `token_nll` computes it from the text. None where it must be computed: the LM generated
            the text from another input, or the text is encoded as other tokens than were generated.
        seconds: The time of generation.
    """

    texts: list[str]
    nats: list[float]
    prices: list[float]
    tokens: list[int]
    bare_nats: list[list[float] | None]
    seconds: float


@dataclass(frozen=True)
class ContinuationGenerator:
    """A language model with sampling settings that continues prompts.

    Attributes:
        lm: The language model.
        tokenizer: Its tokenizer.
        sampling: The sampling settings.
        ends: The ids of the tokens that end a text.
        bos_token_id: The token that is prepended to every prompt, as in the HMM's training data; if
            None, the tokenizer's special tokens are added.
        chat: Whether prompts come from `foretrace.chat.render_chat`: then no token is prepended.

    Example:
        >>> from foretrace.evaluate.continuations import Method, Sampling, ContinuationGenerator
        >>> sampling = Sampling(continuations=2, max_new_tokens=3)
        >>> generator = ContinuationGenerator(model, tokenizer, sampling, ends=[0], bos_token_id=0)
        >>> file = folder / "generations.jsonl"
        >>> generations = generator.generate(["Hello", "Good"], Method("bare"), file, {})
        >>> [len(generation.texts) for generation in generations]
        [2, 2]
    """

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    sampling: Sampling
    ends: Sequence[int]
    bos_token_id: int | None = None
    chat: bool = False

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        if self.chat:  # the template has written the special tokens
            encoded: list[list[int]] = self.tokenizer(
                list(prompts), add_special_tokens=False
            ).input_ids
            return encoded
        return encode_with_bos(self.tokenizer, prompts, self.bos_token_id)

    def generate(
        self,
        prompts: Sequence[str],
        method: Method,
        file: str | os.PathLike[str],
        settings: Mapping[str, Any],
        on_progress: OnProgress = lambda done, total: None,
    ) -> list[Generation]:
        """Generate continuations of all prompts, except those that the file already holds.

        The random numbers of a batch depend only on the seed and the position of the batch. A
        resumed run therefore has the same result as an uninterrupted one.

        Args:
            prompts: The prompts.
            method: The method of generation.
            file: The file of JSON lines that continuations are appended to.
            settings: All other settings that affect the continuations. The file stores them.
            on_progress: Called after each batch with the numbers of prompts done and of all.

        Returns:
            The continuations of each prompt.

        Raises:
            InvalidFileError: If the file was written with other settings, or by another version.
        """
        file = Path(file)
        settings = {**settings, "sampling": asdict(self.sampling), "method": method.name}
        generations = _read(file, settings)
        inputs = method.prompts or prompts
        prompts_per_batch = max(
            1, self.sampling.rows // (self.sampling.continuations * method.best_of)
        )
        for start in range(0, len(prompts), prompts_per_batch):
            batch = range(start, min(start + prompts_per_batch, len(prompts)))
            if any(index not in generations for index in batch):
                batch_inputs = [inputs[index] for index in batch]
                generations |= dict(
                    zip(batch, self._generate_batch(batch_inputs, method, batch), strict=True)
                )
                rows = [{"prompt": index, **generations[index]._asdict()} for index in batch]
                _io.append_lines(file, rows)
            on_progress(batch[-1] + 1, len(prompts))
        return [generations[index] for index in range(len(prompts))]

    def relative_costs(
        self,
        prompts: Sequence[str],
        methods: Sequence[Method],
        baseline: Method,
        on_progress: OnProgress = lambda done, total: None,
    ) -> dict[str, float]:
        """Measure the time that methods take, relative to a baseline.

        In every turn, the baseline and then each method generate the same texts once. Ratios are
        within a turn, because other processes may slow the machine down. Only the first tokens
        of a text are generated, because a later step takes about as long.

        Args:
            prompts: The prompts, of which the first two are continued.
            methods: The methods to measure.
            baseline: The method to compare with.
            on_progress: Called after each turn with the numbers of turns done and of all.

        Returns:
            The median of the ratios of the times, by the name of the method.
        """
        tokens = min(self.sampling.max_new_tokens, TIMED_TOKENS)
        for method in (baseline, *methods):
            self._time(prompts, method, min(tokens, WARM_UP_TOKENS))
        turns = []
        for turn in range(TIMED_RUNS):
            bare, *others = (self._time(prompts, one, tokens) for one in (baseline, *methods))
            turns.append([seconds / bare for seconds in others])
            on_progress(turn + 1, TIMED_RUNS)
        names = [method.name for method in methods]
        return dict(zip(names, np.median(turns, axis=0).tolist(), strict=True))

    def _time(self, prompts: Sequence[str], method: Method, tokens: int) -> float:
        indices = range(min(TIMED_PROMPTS, len(prompts)))
        inputs = [(method.prompts or prompts)[index] for index in indices]
        timed = replace(self, sampling=replace(self.sampling, max_new_tokens=tokens))
        return timed._generate_batch(inputs, method, indices)[0].seconds

    def _generate_batch(
        self, inputs: list[str], method: Method, indices: range
    ) -> list[Generation]:
        """Continue the prompts with the given indices."""
        torch.manual_seed(_batch_seed(self.sampling.seed, indices[0]))
        encoded = self.encode(inputs)
        sampling = self.sampling
        plugin = method.plugin
        top_p = sampling.top_p if plugin.top_p is None else plugin.top_p
        sampler = _PluginSampler(
            plugin.model or self.lm, self.ends, sampling.max_new_tokens, top_p, plugin
        )
        goals = None if method.goals is None else [method.goals[index] for index in indices]
        with plugin.active():
            start = perf_counter()
            drawn = sampler.draw(encoded, sampling.continuations * method.best_of, goals)
            seconds = (perf_counter() - start) / len(inputs)
        generations = []
        for index, prompt, prompt_ids, candidates in zip(
            indices, inputs, encoded, drawn, strict=True
        ):
            chosen = candidates
            if method.best_of > 1:
                chosen = self._best(candidates, method.best_of, method.best_by[index])
            texts = [decode_after(self.tokenizer, prompt_ids, text.tokens) for text in chosen]
            nats = [-text.log_probability for text in chosen]
            prices = [text.price for text in chosen]
            tokens = [len(text.tokens) for text in chosen]
            bare_nats: list[list[float] | None] = [None] * len(chosen)
            if method.prompts is None and plugin.keeps_lm:
                bare_nats = self._bare_nats(prompt, prompt_ids, texts, chosen)
            generations.append(Generation(texts, nats, prices, tokens, bare_nats, seconds))
        return generations

    def _bare_nats(
        self, prompt: str, prompt_ids: list[int], texts: Sequence[str], drawn: Sequence[Drawn]
    ) -> list[list[float] | None]:
        """Return the losses of texts that are encoded as the tokens drawn; None of others.

        A special token that ends a text is not in the text, and has no loss.
        """
        losses: list[list[float] | None] = []
        encoded = self.encode([prompt + text for text in texts])
        for ids, text in zip(encoded, drawn, strict=True):
            is_same = ids == [*prompt_ids, *text.tokens][: len(ids)]
            nats = text.bare_nats[: len(ids) - len(prompt_ids)]
            losses.append([round(one, NATS_DIGITS) for one in nats] if is_same else None)
        return losses

    def _best(self, candidates: Sequence[Drawn], of: int, attribute: Attribute) -> list[Drawn]:
        """Choose from every `of` candidates the one with the greatest attribute probability.

        Blank candidates come last: an empty text satisfies every attribute.
        """
        texts = [
            [token for token in candidate.tokens if token not in self.ends]
            for candidate in candidates
        ]
        nonblank = torch.tensor([bool(str(self.tokenizer.decode(text)).strip()) for text in texts])
        ranks = (attribute.probability(texts) + nonblank.double()).view(-1, of)
        best = ranks.argmax(1).tolist()
        return [candidates[row * of + column] for row, column in enumerate(best)]


@dataclass(frozen=True)
class _PluginSampler(Sampler):
    """A sampler whose logits a plug-in changes, if it has a processor, or else goals."""

    plugin: Plugin = NO_PLUGIN

    def processor(self, goals: Goals, prompts: Prompts, mask: Tensor) -> LogitsProcessor:
        if self.plugin.processor is None:
            return super().processor(goals, prompts, mask)
        return self.plugin.processor(prompts)


def encode_with_bos(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], bos_token_id: int | None
) -> list[list[int]]:
    """Tokenize prompts and prepend a token, or the tokenizer's special tokens if it is None.

    Example:
        >>> from foretrace.evaluate.continuations import encode_with_bos
        >>> encode_with_bos(tokenizer, ["Hello"], 0)[0][0]
        0
    """
    if bos_token_id is None:
        return encode_prompts(tokenizer, prompts)
    encoded = tokenizer(list(prompts), add_special_tokens=False).input_ids
    return [[bos_token_id, *ids] for ids in encoded]


def _batch_seed(seed: int, first_index: int) -> int:
    """Derive the seed of a batch from the run's seed and the index of its first prompt."""
    return int(np.random.SeedSequence([seed, first_index]).generate_state(1)[0])


def _read(file: Path, settings: Mapping[str, Any]) -> dict[int, Generation]:
    """Read the continuations in a file by prompt index; create the file if there is none."""
    rows = _io.read_lines(file)
    if not rows:
        _io.write_lines(file, [{"settings": dict(settings)}])
        return {}
    if rows[0].get("settings") != settings:
        raise InvalidFileError(
            f"{file} holds texts that were generated with other settings. Choose another folder, "
            f"or remove the file to generate them again."
        )
    try:
        return {
            row["prompt"]: Generation(*(row[name] for name in Generation._fields))
            for row in rows[1:]
        }
    except KeyError as error:
        raise InvalidFileError(
            f"{file} lacks {error}, because another version of foretrace wrote it. Remove the file "
            f"to generate the texts again."
        ) from error
