"""Drawing text through vLLM, where it is installed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretrace.distill.sampling.source import encode, end_of_text, load_both, padded, public_name
from foretrace.errors import InvalidInputError
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class VLLMSource:
    """Draws through vLLM's offline engine, which batches by itself and spreads over GPUs."""

    name: str
    engine: Any  # vllm.LLM: vLLM is not typed, and not installed everywhere
    tokenizer: "PreTrainedTokenizerBase"
    eos_token_id: int
    vocab_size: int = field(init=False)
    tokenizer_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = int(self.engine.llm_engine.model_config.get_vocab_size())
        self.tokenizer_fingerprint = fingerprint(self.tokenizer.get_vocab())

    @property
    def width(self) -> int:
        """How many sequences are drawn at once."""
        return int(self.engine.llm_engine.vllm_config.scheduler_config.max_num_seqs)

    @classmethod
    def load(
        cls, name: str, *, end_of_text_token: str | None = None, **options: Any
    ) -> "VLLMSource":
        """Load a model by folder or hub id; `options` go to `vllm.LLM`."""
        from transformers import AutoTokenizer

        try:
            from vllm import LLM
        except ImportError:
            raise InvalidInputError(
                "vLLM is not installed in this environment: pip install 'foretrace[vllm]', or use "
                "--engine transformers."
            ) from None
        tokenizer, engine = load_both(name, AutoTokenizer, partial(LLM, model=name), options)
        return cls(public_name(name), engine, tokenizer, end_of_text(tokenizer, end_of_text_token))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn texts into token ids, without special tokens."""
        return encode(self.tokenizer, texts)

    def draw(self, prefixes: Sequence[Sequence[int]], length: int, seed: int) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        from vllm import SamplingParams

        # A seed per row: one for all would draw the same text for equal prefixes, and none would
        # make every worker repeat the engine's one stream.
        seeds = np.random.default_rng(seed).integers(2**31, size=len(prefixes))
        settings = [
            SamplingParams(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_tokens=length - len(prefix),
                stop_token_ids=[self.eos_token_id],
                ignore_eos=True,  # the model's own list of ends may be another
                detokenize=False,
                seed=int(row_seed),
            )
            for prefix, row_seed in zip(prefixes, seeds, strict=True)
        ]
        prompts = [{"prompt_token_ids": [self.eos_token_id, *prefix]} for prefix in prefixes]
        drawn = self.engine.generate(prompts, settings, use_tqdm=False)
        texts = [
            torch.tensor([*prefix, *done.outputs[0].token_ids])
            for prefix, done in zip(prefixes, drawn, strict=True)
        ]
        return padded(texts, length, self.eos_token_id)

    def close(self) -> None:
        """Shut the engine down, which else keeps its GPUs to itself."""
        self.engine.llm_engine.engine_core.shutdown()
        del self.engine
