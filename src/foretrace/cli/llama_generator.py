"""Generate continuations of prompts with llama.cpp, steered or unsteered, with streaming."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from foretrace.cli.text_generator import Generation, attribute_probabilities

if TYPE_CHECKING:
    from llama_cpp import Llama
    from transformers import PreTrainedTokenizerBase

    from foretrace.chat import Prompt
    from foretrace.cli.goal_options import LoadedGoals
    from foretrace.context import Probe
    from foretrace.engines.llama_cpp import SteeringProcessor


def load_gguf_tokenizer(file: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a GGUF file, for use as one of transformers."""
    from foretrace.cli.terminal import print_warnings
    from foretrace.gguf import GGUFTokenizer

    print_warnings()
    return cast("PreTrainedTokenizerBase", GGUFTokenizer.from_file(file))


def build_gguf_probe(file: str) -> "Probe":
    """Build the probe of a GGUF file from its dequantised head."""
    from foretrace.context import Probe, read_head

    return Probe.build(read_head(file), source=Path(file).name)


@dataclass(frozen=True)
class LlamaGenerator:
    """Generates continuations of prompts with llama.cpp, steered or unsteered, from one seed."""

    llm: "Llama"
    tokenizer: "PreTrainedTokenizerBase"
    goals: "LoadedGoals | None"
    max_new_tokens: int
    temperature: float
    top_p: float

    @classmethod
    def load(
        cls,
        file: str,
        tokenizer: "PreTrainedTokenizerBase",
        goals: "LoadedGoals | None",
        prompts: "Sequence[Prompt]",
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        device: str,
    ) -> "LlamaGenerator":
        """Load the language model, with a context that the longest of the prompts fits."""
        from foretrace.engines.prompts import encode_prompts
        from foretrace.gguf import load_llama

        goal = None if goals is None else goals.goal
        longest = max(map(len, encode_prompts(tokenizer, prompts, goal)))
        layers = 0 if device == "cpu" else -1  # all; without effect where llama.cpp has no GPU
        llm = load_llama(file, n_ctx=longest + max_new_tokens, n_gpu_layers=layers)
        return cls(llm, tokenizer, goals, max_new_tokens, temperature, top_p)

    def generate(
        self,
        prompts: "Sequence[Prompt]",
        seed: int,
        *,
        steered: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Generation]:
        """Generate a continuation of each text, and an answer to each chat, one after another.

        If there is a single prompt, `on_text` is called with the generated text after each token.
        """
        from foretrace.engines.llama_cpp import SteeringProcessor
        from foretrace.engines.prompts import encode_prompts, hmm_ends, turn_ends

        goal = None if self.goals is None else self.goals.goal
        steered = steered and goal is not None
        prices: list[float] = []
        # One for all texts: it reads the whole vocabulary of the file.
        processor = SteeringProcessor(
            self.llm,
            goal if steered else None,
            max_new_tokens=self.max_new_tokens,
            stop_ids=[*hmm_ends(goal), *turn_ends(self.tokenizer, prompts)],
            on_price=prices.append,
        )
        generations = []
        for row, prompt_ids in enumerate(encode_prompts(self.tokenizer, prompts, goal)):
            prices.clear()
            text = self._generate(
                prompt_ids,
                processor,
                prices if steered else None,
                seed + row,
                on_text if len(prompts) == 1 else None,
            )
            generations.append(text)
        return generations

    def _generate(
        self,
        prompt_ids: list[int],
        processor: "SteeringProcessor",
        prices: Sequence[float] | None,
        seed: int,
        on_text: Callable[[str], None] | None,
    ) -> Generation:
        """Generate one text. The processor appends the price of each token to `prices`."""
        from foretrace.engines.llama_cpp import generate_tokens
        from foretrace.engines.prompts import decode_after, report_text

        token_ids: list[int] = []
        for token in generate_tokens(
            self.llm,
            prompt_ids,
            processor=processor,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=seed,
        ):
            token_ids.append(token)
            if on_text is not None:
                report_text(decode_after(self.tokenizer, prompt_ids, token_ids), on_text)
        return Generation(
            decode_after(self.tokenizer, prompt_ids, token_ids),
            attribute_probabilities(self.goals, prompt_ids, token_ids, processor.stop_ids),
            None if prices is None else sum(prices) / len(token_ids),
            prompt_ids,
            token_ids,
        )
