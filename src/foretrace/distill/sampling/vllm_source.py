"""Sample text with vLLM, where it is installed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretrace._hardware import default_dtype
from foretrace.chat import Prompt
from foretrace.distill.sampling.source import (
    encode,
    find_ends,
    load_tokenizer_and_model,
    pad_rows,
    public_name,
)
from foretrace.errors import InvalidInputError
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class VLLMSource:
    """Samples with vLLM's offline engine, which forms batches and uses several GPUs by itself."""

    name: str
    engine: Any  # vllm.LLM: vLLM is not typed, and it is optional
    tokenizer: "PreTrainedTokenizerBase"
    ends: tuple[int, ...]
    vocab_size: int = field(init=False)
    tokenizer_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = int(self.engine.llm_engine.model_config.get_vocab_size())
        self.tokenizer_fingerprint = fingerprint(self.tokenizer.get_vocab())

    @property
    def eos_token_id(self) -> int:
        """The first of the tokens that end a text; it also begins texts."""
        return self.ends[0]

    @property
    def batch_size(self) -> int:
        """The number of sequences that are sampled at once."""
        return int(self.engine.llm_engine.vllm_config.scheduler_config.max_num_seqs)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        end_of_text_token: str | None = None,
        chat: bool = False,
        dtype: "str | torch.dtype" = "auto",
        **options: Any,
    ) -> "VLLMSource":
        """Load a model by folder or hub id; `options` go to `vllm.LLM`.

        With the dtype `"auto"`, the CPU decides, or vLLM on a GPU.
        """
        from transformers import AutoTokenizer

        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError:
            raise InvalidInputError(
                "vLLM is not installed in this environment: pip install 'foretrace[vllm]', or use "
                "--engine transformers."
            ) from None
        # On a CPU, vLLM would choose bfloat16 even if it is emulated. On a GPU it chooses a dtype
        # that the GPU supports; to ask the GPU here would initialise CUDA before vLLM forks.
        if current_platform.is_cpu():
            dtype = default_dtype("cpu") if dtype == "auto" else dtype
            # After a part of a prompt, vLLM rewinds the request's generator, which torch supports
            # on a GPU only: seeded requests with chunked prefill fail on a CPU.
            options.setdefault("enable_chunked_prefill", False)
        tokenizer, engine = load_tokenizer_and_model(
            name, AutoTokenizer, partial(LLM, model=name), {"dtype": dtype, **options}
        )
        model_ends = engine.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
        ends = find_ends(tokenizer, end_of_text_token, chat=chat, model_ends=model_ends)
        return cls(public_name(name), engine, tokenizer, ends)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Convert texts to token ids without special tokens, and chats by the chat template."""
        return encode(self.tokenizer, prompts)

    def draw(
        self,
        prefixes: Sequence[Sequence[int]],
        length: int,
        seed: int,
        contexts: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        from vllm import SamplingParams

        # A seed per row: a common seed would sample the same text for equal prefixes, and without
        # seeds every worker would repeat the engine's default stream.
        seeds = np.random.default_rng(seed).integers(2**31, size=len(prefixes))
        settings = [
            SamplingParams(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_tokens=length - len(prefix),
                stop_token_ids=list(self.ends),
                ignore_eos=True,  # the model may list other end-of-text tokens
                detokenize=False,
                seed=int(row_seed),
            )
            for prefix, row_seed in zip(prefixes, seeds, strict=True)
        ]
        contexts = [[self.eos_token_id]] * len(prefixes) if contexts is None else contexts
        prompts = [
            {"prompt_token_ids": [*context, *prefix]}
            for context, prefix in zip(contexts, prefixes, strict=True)
        ]
        outputs = self.engine.generate(prompts, settings, use_tqdm=False)
        sequences = [
            torch.tensor([*prefix, *output.outputs[0].token_ids])
            for prefix, output in zip(prefixes, outputs, strict=True)
        ]
        return pad_rows(sequences, length, self.ends)

    def close(self) -> None:
        """Shut the engine down, so that it frees its GPUs."""
        self.engine.llm_engine.engine_core.shutdown()
        del self.engine
