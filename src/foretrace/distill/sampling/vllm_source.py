"""Sample text with vLLM, where it is installed."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrace._hardware import default_dtype
from foretrace.distill.sampling.source import (
    Source,
    TokenLists,
    find_ends,
    load_tokenizer_and_model,
    pad_rows,
    public_name,
)
from foretrace.errors import InvalidInputError


@dataclass
class VLLMSource(Source):
    """Samples with vLLM's offline engine, which forms batches and uses several GPUs by itself."""

    engine: Any  # vllm.LLM: vLLM is not typed, and it is optional

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the language model can emit."""
        return int(self.engine.llm_engine.model_config.get_vocab_size())

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
        return cls(public_name(name), tokenizer, ends, engine)

    def draw(
        self, prefixes: TokenLists, length: int, seed: int, contexts: TokenLists | None = None
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
        contexts = self.contexts_or_start(contexts, len(prefixes))
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
