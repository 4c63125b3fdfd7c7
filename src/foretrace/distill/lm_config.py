"""How to run the language model that an HMM is distilled from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrace.distill.em.distributed import launched
from foretrace.distill.sampling.source import Source, both_know
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.distill.sampling.vllm_source import VLLMSource
from foretrace.errors import InvalidInputError

ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class LMConfig:
    """How to run the language model."""

    engine: str = "transformers"
    """What draws: transformers or vllm. Hidden states are always read by transformers."""
    dtype: str = "auto"
    end_of_text: str | None = None
    """The token that begins and ends texts, if not the tokenizer's own."""
    device: str = "cpu"
    """Where transformers runs; vLLM finds its own devices."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the engine: tensor_parallel_size, max_num_seqs, ..."""
    reader_options: Mapping[str, Any] | None = None
    """Options of transformers for reading hidden states, if not the engine's: device_map, ..."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidInputError(f"There is no engine '{self.engine}': {' or '.join(ENGINES)}.")

    def source(self, name: str, length: int) -> Source:
        """Load the LM to draw rows of `length` tokens."""
        if self.engine == "transformers":
            return self.reader(name)
        if launched().size > 1:
            raise InvalidInputError(
                "vLLM spreads over GPUs by itself, not under torchrun. Let it sample first, by one "
                "process or several with GPUs of their own (CUDA_VISIBLE_DEVICES); then run the "
                "same command under torchrun to train."
            )
        sizes = {"max_model_len": length + 1, **self.options}
        return VLLMSource.load(name, end_of_text_token=self.end_of_text, dtype=self.dtype, **sizes)

    def reader(self, name: str) -> TransformersSource:
        """Load the LM by transformers, which can tell hidden states."""
        options = self.reader_options
        if options is None:
            options = self.options if self.engine == "transformers" else both_know(self.options)
        loaded = TransformersSource.load(
            name, end_of_text_token=self.end_of_text, dtype=self.dtype, **options
        )
        if "device_map" not in options:
            loaded.model.to(self.device)  # type: ignore[arg-type]
        return loaded
