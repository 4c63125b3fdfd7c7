"""Steering in llama.cpp, through llama-cpp-python."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from foretrace.distill.sampling.llama_source import LlamaSource
from foretrace.engines.host import HostProcessor
from foretrace.engines.prompts import start_ids
from foretrace.errors import InvalidInputError
from foretrace.gguf import GGUFTokenizer
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal
from foretrace.vocabulary import require_same_fingerprint

if TYPE_CHECKING:
    from llama_cpp import Llama

NUM_TEXTS = 32  # in which the frequencies of tokens are measured
NO_SEED = 0xFFFFFFFF  # llama.cpp chooses a random seed instead of this one


class SteeringProcessor(HostProcessor):
    """Steer one text after another in llama-cpp-python.

    Pass it to `create_completion`, `create_chat_completion` or `generate` of a `llama_cpp.Llama`,
    as `logits_processor=LogitsProcessorList([processor])`. The HMM runs in torch. Grammars apply
    after it. Do not combine a grammar with required text: llama.cpp aborts where the grammar
    forbids all tokens that lead to the text.

    llama.cpp calls processors through C, which drops exceptions. If steering fails, the text ends
    at once, Python prints the exception, and `error` has it.

    Args:
        llm: The language model.
        goal: The goal; None to leave logits unchanged.
        max_new_tokens: The `max_tokens` of llama-cpp-python.
        stop_ids: Tokens that end a text, in addition to the HMM's and the GGUF file's.
        on_price: As for `HostProcessor`.

    Raises:
        InvalidInputError: The language model has a draft model.
        TokenizerMismatchError: The HMM was made with another tokenizer.

    Example:
        >>> from foretrace.engines.llama_cpp import SteeringProcessor
        >>> goal = ft.Compiler(hmm, horizon=8).compile(ft.Goal(attribute, strength=2.0))
        >>> processor = SteeringProcessor(llm, goal, max_new_tokens=8)  # doctest: +SKIP
        >>> answer = llm.create_completion(
        ...     "hello", max_tokens=8, logits_processor=LogitsProcessorList([processor])
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        llm: "Llama",
        goal: CompiledGoal | None,
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        on_price: Callable[[float], None] | None = None,
    ) -> None:
        if llm.draft_model is not None:
            raise InvalidInputError(
                "A language model with a draft model cannot be steered: llama-cpp-python does not "
                "tell processors how many of the drafted tokens precede the next one. Load it "
                "without `draft_model`."
            )
        tokenizer = GGUFTokenizer(llm)
        all_stops = [*tokenizer.end_token_ids, *stop_ids]
        if goal is not None:
            all_stops += goal.hmm.config.eos_token_ids
            require_same_fingerprint(
                "The HMM", goal.hmm.config.tokenizer_fingerprint, tokenizer.fingerprint
            )
        super().__init__(
            goal,
            max_new_tokens=max_new_tokens,
            stop_ids=list(dict.fromkeys(all_stops)),
            on_price=on_price,
        )
        self.error: BaseException | None = None
        self._end = llm.token_eos()

    def begin(self) -> None:
        """Begin a text: the token ids of the next call are its prompt."""
        super().begin()
        self.error = None

    def __call__(
        self, input_ids: NDArray[np.integer], scores: NDArray[np.floating]
    ) -> NDArray[np.float32]:
        """Reweight the next token.

        Args:
            input_ids: The prompt and the generated tokens, (length,).
            scores: Logits of the next token, (V or more,). They are changed only if steering fails.

        Returns:
            The steered logits, of the same shape.
        """
        try:
            return super().__call__(input_ids, scores)
        except BaseException as error:
            self.error = error
            # llama.cpp goes on with these scores: nothing but the end may follow.
            scores[:] = -np.inf
            scores[self._end] = 0.0
            raise


def unigram_hmm(file: str, *, length: int = 8, seed: int = 0) -> HMM:
    """Measure the frequencies of the tokens of a GGUF file's LM, as an HMM with one state.

    It does what `foretrace.engines.transformers.unigram_hmm` does, with llama.cpp.

    Args:
        file: The GGUF file.
        length: The number of tokens of each of 32 texts.
        seed: The random seed.

    Returns:
        The HMM.

    Raises:
        InvalidFileError: There is no such file, or llama.cpp cannot load it.
        InvalidInputError: llama-cpp-python is not installed, or the file has no token to begin or
            to end a text.

    Example:
        >>> from foretrace.engines.llama_cpp import unigram_hmm
        >>> hmm = unigram_hmm("SmolLM2-135M-Instruct.Q4_1.gguf")  # doctest: +SKIP
    """
    source = LlamaSource.load(file, length, chat=False)
    try:
        tokenizer = source.tokenizer
        source.ends = tuple(dict.fromkeys([*source.ends, *GGUFTokenizer(source.llm).end_token_ids]))
        total = torch.zeros(source.vocab_size)
        for logits in source.openings(start_ids(tokenizer, source.ends), NUM_TEXTS, length, seed):
            total += logits.softmax(-1).mean(0)
        return HMM.unigram(
            total,
            eos_token_ids=source.ends,
            tokenizer_fingerprint=source.tokenizer_fingerprint,
            source_model=source.name,
        )
    finally:
        source.close()


def generate_tokens(
    llm: "Llama",
    prompt: Sequence[int],
    *,
    processor: SteeringProcessor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Generate a continuation of token ids, token by token.

    Temperature and top-p apply in this order, as in transformers. llama.cpp on its own applies
    them in the reverse order.

    Args:
        llm: The language model.
        prompt: Token ids of the prompt, at least one.
        processor: The processor, with or without a goal. Its stop tokens end the text.
        max_new_tokens: Tokens to generate at most.
        temperature: The sampling temperature; 0 is greedy.
        top_p: The probability of the nucleus.
        seed: The random seed.

    Yields:
        The new token ids, with the end-of-text token.

    Raises:
        InvalidInputError: The prompt and the new tokens do not fit the context.

    Example:
        >>> from foretrace.engines.llama_cpp import generate_tokens
        >>> tokens = generate_tokens(
        ...     llm, [5, 6], processor=processor, max_new_tokens=4
        ... )  # doctest: +SKIP
    """
    from llama_cpp import LogitsProcessorList

    context = len(llm.input_ids)  # `n_ctx`, which llama.cpp may have rounded up
    if len(prompt) + max_new_tokens > context:
        raise InvalidInputError(
            f"A prompt of {len(prompt)} tokens and {max_new_tokens} new tokens do not fit the "
            f"context of {context} tokens. Load the model with a larger `n_ctx`."
        )

    def divide(_: NDArray[np.integer], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        return scores / np.float32(temperature)

    processors = LogitsProcessorList([] if processor.goal is None else [processor])
    if temperature not in (0.0, 1.0):
        processors.append(divide)
    processor.begin()
    # Tokens in the cache would be computed in other batches, and round differently: the same seed
    # would not always give the same text.
    llm.reset()
    llm.set_seed(seed % NO_SEED)
    tokens = llm.generate(
        list(prompt),
        top_k=0,
        top_p=top_p,
        min_p=0.0,
        temp=0.0 if temperature == 0 else 1.0,
        logits_processor=processors or None,
    )
    for _, token in zip(range(max_new_tokens), tokens, strict=False):
        if processor.error is not None:
            raise processor.error
        yield token
        if token in processor.stop_ids:
            return
