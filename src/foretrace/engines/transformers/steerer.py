"""`Steerer`: an LM with its HMM and its attributes, which generates steered texts."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, NamedTuple, Unpack, overload

from torch import Tensor

from foretrace.attribute import Attribute, AttributeStore
from foretrace.chat import Messages, Prompt, is_chat
from foretrace.context import Head, Probe
from foretrace.engines.prompts import probabilities
from foretrace.engines.token_bytes import TokenBytes
from foretrace.engines.transformers.generation import stop_tokens
from foretrace.engines.transformers.priced import OnText, PricedText, generate_priced
from foretrace.engines.transformers.processor import SteeringProcessor
from foretrace.engines.transformers.unigram import unigram_hmm
from foretrace.errors import ForetraceError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal, Compiler
from foretrace.steering.compiler import DEFAULT_MEMORY
from foretrace.steering.goal_input import GoalInput, GoalOptions, read_goal
from foretrace.vocabulary import fingerprint, require_same_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_NEW_TOKENS = 40
UNIGRAM_TOKENS = 8  # of each text in which token frequencies are measured: takes seconds
Goals = GoalInput | Sequence[GoalInput]
Path = str | os.PathLike[str]


class GenerateOptions(GoalOptions, total=False):
    """How to generate texts, besides `GoalOptions`."""

    max_new_tokens: int
    """Tokens to generate at most; 40 by default."""
    temperature: float
    """The sampling temperature, 1 by default; 0 is greedy."""
    top_p: float
    """The probability of the nucleus; 1 by default."""
    seed: int
    """The random seed, 0 by default. The same seed gives the same text."""
    bare: bool
    """Whether to generate the unsteered text from the same seed too."""


@dataclass(frozen=True)
class SteeredText:
    """A steered text.

    Attributes:
        text: The text after the prompt.
        price: The mean price of steering, in nats per token; 0 without a goal.
        probabilities: The probability of each attribute of the goal in the text, by name. Empty if
            the goal's window has not begun.
        bare: The unsteered text from the same seed, if it was asked for.
    """

    text: str
    price: float
    probabilities: Mapping[str, float]
    bare: str | None = None


class _Target(NamedTuple):
    """A compiled goal, and the attributes that it names."""

    goal: CompiledGoal | None
    attributes: Mapping[str, Attribute]

    def judge(self, text: PricedText) -> dict[str, float]:
        """Return the probability of each attribute in the part of a text that the goal is about."""
        if self.goal is None:
            return {}
        ids, window = (text.prompt_ids, text.token_ids, text.stop_ids), self.goal.window
        values = probabilities(self.attributes.values(), window, *ids)
        return dict(zip(self.attributes, values, strict=False))


class Steerer:
    """Generates texts of a language model, steered toward goals.

    Goals are compiled at their first use, and the compiler keeps their tables.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer.
        hmm: Its HMM, or a folder or hub id of it. Without one, goals look at the next token alone:
            `unigram_hmm` measures the frequencies of tokens, which takes seconds.
        attributes: What names in goals mean: a folder, a store, or a mapping from names to
            attributes.
        memory: How many bytes of tables the compiler keeps.

    Attributes:
        compiler: The compiler of all goals.

    Raises:
        TokenizerMismatchError: The HMM was made with another tokenizer.

    Example:
        >>> steerer = ft.Steerer(model, tokenizer, hmm, {"nontoxic": attribute})
        >>> result = steerer.generate("hello", "nontoxic", level="strong", max_new_tokens=4)
        >>> list(result.probabilities), result.price >= 0
        (['nontoxic'], True)
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        hmm: HMM | Path | None = None,
        attributes: Path | Mapping[str, Attribute] | None = None,
        *,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        known = fingerprint(tokenizer.get_vocab())
        if hmm is None:
            hmm = unigram_hmm(model, tokenizer, length=UNIGRAM_TOKENS)
        elif isinstance(hmm, HMM):
            require_same_fingerprint("The HMM", hmm.config.tokenizer_fingerprint, known)
        else:
            hmm = HMM.from_pretrained(hmm, tokenizer_fingerprint=known)
        self.compiler = Compiler(hmm.to(model.device), memory=memory)
        if isinstance(attributes, str | os.PathLike):
            attributes = AttributeStore(attributes, tokenizer_fingerprint=known)
        self.attributes: Mapping[str, Attribute] = {} if attributes is None else attributes

    @overload
    def generate(
        self, prompt: str, goal: GoalInput = None, **options: Unpack[GenerateOptions]
    ) -> SteeredText: ...
    @overload
    def generate(
        self,
        prompt: list[str],
        goal: Goals = None,
        **options: Unpack[GenerateOptions],
    ) -> list[SteeredText]: ...
    def generate(
        self,
        prompt: str | list[str],
        goal: Goals = None,
        **options: Unpack[GenerateOptions],
    ) -> SteeredText | list[SteeredText]:
        """Continue a text, or a batch of texts.

        Args:
            prompt: A text, or a list of texts. An empty one begins a new text.
            goal: An expression such as "positive & ~political", an attribute, or a `Goal`. For a
                list of texts, also a list with a goal or None for each.
            **options: See `GenerateOptions` and `GoalOptions`.

        Returns:
            The steered text; for a list, a list of them.

        Raises:
            InvalidInputError: A goal names an unknown attribute, is not an expression, or cannot be
                reached, or the goals do not fit the prompts.

        Example:
            >>> steerer = ft.Steerer(model, tokenizer, hmm, {"nontoxic": attribute})
            >>> goals = ["nontoxic", None]
            >>> first, second = steerer.generate(["hello", ""], goals, max_new_tokens=4, bare=True)
            >>> second.text == second.bare
            True
        """
        if isinstance(prompt, str):
            return self._steer([prompt], goal, **options)[0]
        return self._steer(prompt, goal, **options)

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        goal: GoalInput = None,
        **options: Unpack[GenerateOptions],
    ) -> SteeredText: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, str]]],
        goal: Goals = None,
        **options: Unpack[GenerateOptions],
    ) -> list[SteeredText]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        goal: Goals = None,
        **options: Unpack[GenerateOptions],
    ) -> SteeredText | list[SteeredText]:
        """Answer a chat, or a batch of chats, through the tokenizer's chat template.

        Args:
            messages: The messages of a chat, `{"role": ..., "content": ...}`; or a list of chats.
            goal: As for `generate`.
            **options: As for `generate`.

        Returns:
            The answer; for a list of chats, a list of them.

        Raises:
            InvalidInputError: As `generate`; or the tokenizer has no chat template.

        Example:
            >>> steerer = ft.Steerer(model, tokenizer, hmm, {"nontoxic": attribute})
            >>> chat = [{"role": "user", "content": "hello"}]
            >>> answer = steerer.chat(chat, "nontoxic", max_new_tokens=4)
        """
        if is_chat(messages):
            return self._steer([messages], goal, **options)[0]
        chats = [chat for chat in messages if is_chat(chat)]
        if len(chats) < len(messages):
            raise InvalidInputError(
                'Pass a chat as a list of messages, {"role": "user", "content": "..."}, or a list '
                "of chats. `generate` continues texts."
            )
        return self._steer(chats, goal, **options)

    def stream(
        self, prompt: Prompt, goal: GoalInput = None, **options: Unpack[GenerateOptions]
    ) -> Generator[str, None, None]:
        """Yield the text in pieces while it is generated. Their sum is the text of `generate`.

        The text is generated in a thread, which ends when the iterator is closed.

        Args:
            prompt: A text to continue, or the messages of a chat.
            goal: As for `generate`.
            **options: As for `generate`.

        Yields:
            Pieces of the text.

        Raises:
            InvalidInputError: As `generate`, at the first piece.

        Example:
            >>> steerer = ft.Steerer(model, tokenizer, hmm, {"nontoxic": attribute})
            >>> text = "".join(steerer.stream("hello", "nontoxic", max_new_tokens=4))
            >>> text == steerer.generate("hello", "nontoxic", max_new_tokens=4).text
            True
        """
        texts: SimpleQueue[str | None] = SimpleQueue()
        closed, shown = Event(), ""

        def report(text: str) -> None:
            if closed.is_set():
                raise ForetraceError("Nobody reads the stream any more.")  # ends the generation
            texts.put(text)

        with ThreadPoolExecutor(1) as executor:
            done = executor.submit(self._steer, [prompt], goal, on_text=report, **options)
            done.add_done_callback(lambda _: texts.put(None))
            try:
                while (text := texts.get()) is not None:
                    yield text[len(shown) :]
                    shown = text
                yield done.result()[0].text[len(shown) :]
            finally:
                closed.set()

    def processor(
        self,
        goal: Goals,
        *,
        prompt_mask: Tensor,
        max_new_tokens: int,
        on_price: Callable[[Tensor], None] | None = None,
        **options: Unpack[GoalOptions],
    ) -> SteeringProcessor:
        """Make a logits processor for a loop of your own, or for `model.generate`.

        Args:
            goal: As for `generate`; a list has a goal or None for each prompt.
            prompt_mask: Attention mask of the prompts, (prompts, T); 0 where padded.
            max_new_tokens: Tokens to generate at most.
            on_price: Called at every step with the price of every row; see `SteeringProcessor`.
            **options: See `GoalOptions`.

        Returns:
            The processor of these prompts: (ids so far, logits) -> steered logits.

        Raises:
            InvalidInputError: As `generate`.

        Example:
            >>> steerer = ft.Steerer(model, tokenizer, hmm, {"nontoxic": attribute})
            >>> ids = tokenizer(["hello"], return_tensors="pt").input_ids
            >>> processor = steerer.processor(
            ...     "nontoxic", prompt_mask=torch.ones_like(ids), max_new_tokens=4
            ... )
            >>> steered = processor(ids, model(ids).logits[:, -1])
        """
        targets = self._targets(goal, len(prompt_mask), options)
        return SteeringProcessor(
            [target.goal for target in targets],
            prompt_mask=prompt_mask,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_tokens(self.model.generation_config, ()),
            on_price=on_price,
        )

    def _steer(
        self,
        prompts: Sequence[Prompt],
        goal: Goals,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        bare: bool = False,
        on_text: OnText | None = None,
        **options: Unpack[GoalOptions],
    ) -> list[SteeredText]:
        """Generate a text for each prompt."""
        targets = self._targets(goal, len(prompts), options)

        def run(steered: bool) -> list[PricedText]:
            return generate_priced(
                self.model,
                self.tokenizer,
                prompts,
                [target.goal for target in targets],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                steered=steered,
                on_text=on_text if steered else None,
            )

        others = [one.text for one in run(False)] if bare else [None] * len(prompts)
        return [
            SteeredText(one.text, one.price or 0.0, target.judge(one), other)
            for one, target, other in zip(run(True), targets, others, strict=True)
        ]

    def _targets(self, goal: Goals, count: int, options: GoalOptions) -> list[_Target]:
        """Compile the goal of each prompt."""
        if isinstance(goal, GoalInput) or not isinstance(goal, Sequence):
            return [self._target(goal, options)] * count
        if len(goal) != count:
            raise InvalidInputError(
                f"There are {len(goal)} goals for {count} prompts. Pass one goal, or a list with a "
                f"goal or None for each prompt."
            )
        return [self._target(one, options) for one in goal]

    def _target(self, goal: GoalInput, options: GoalOptions) -> _Target:
        goals, named = read_goal(
            goal, self.attributes, lambda operand: self._token_bytes.contains(operand), **options
        )
        if self.compiler.probe is None and any(one.attribute.context is not None for one in goals):
            head = Head.of_model(self.model, self.tokenizer)
            self.compiler.probe = Probe.build(head, source=self.model.name_or_path)
        return _Target(self.compiler.compile(goals) if goals else None, named)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes.of(self.tokenizer)
