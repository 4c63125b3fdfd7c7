"""Settings of the language model that an HMM is distilled from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrace.distill.em.distributed import launched_group
from foretrace.distill.sampling.llama_source import LlamaSource
from foretrace.distill.sampling.source import Reader, Source, tokenizer_options
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.distill.sampling.vllm_source import VLLMSource
from foretrace.errors import InvalidInputError
from foretrace.gguf import is_gguf

ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class LMConfig:
    """Settings of the language model that an HMM is distilled from.

    Attributes:
        engine: The engine that samples: `"transformers"` or `"vllm"`. transformers computes the
            hidden states. llama.cpp does both for a GGUF file.
        dtype: The dtype of the model, or `"auto"`: bfloat16 where the hardware has it natively,
            else float16 on GPUs and float32 on CPUs.
        end_of_text: The token that begins and ends texts, if not the tokenizer's own.
        device: The device of transformers; vLLM chooses its devices itself.
        options: Further options of the engine, such as `tensor_parallel_size` or `max_num_seqs`.
        reader_options: Options of transformers to compute hidden states, such as `device_map`; by
            default those of the engine that transformers accepts too.

    Raises:
        InvalidInputError: If the engine is unknown.

    Example:
        >>> from foretrace.distill import LMConfig
        >>> LMConfig(device="cuda", end_of_text="<|endoftext|>").engine
        'transformers'
    """

    engine: str = "transformers"
    dtype: str = "auto"
    end_of_text: str | None = None
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    reader_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidInputError(
                f"There is no engine '{self.engine}'. Use {' or '.join(ENGINES)}."
            )

    def load_source(self, name: str, length: int, *, chat: bool = False) -> Source:
        """Load the LM to sample rows of `length` tokens.

        Args:
            name: A folder, a hub id or a GGUF file.
            length: Tokens per row.
            chat: Whether the rows are answers in chats, which end where turns do.

        Returns:
            The language model.

        Raises:
            InvalidFileError: If the GGUF file cannot be loaded.
            InvalidInputError: If the model cannot be loaded.
        """
        if is_gguf(name):
            return self._load_llama(name, length, chat=chat)
        if self.engine == "transformers":
            return self.load_transformers(name, chat=chat)
        if launched_group().size > 1:
            raise InvalidInputError(
                "vLLM cannot sample under torchrun: it distributes over GPUs by itself. Sample "
                "first without torchrun, in one process or in several with separate GPUs "
                "(CUDA_VISIBLE_DEVICES). Then run the same command under torchrun to train."
            )
        # The prompts of chats are not part of the rows, and may be longer than them.
        options = dict(self.options) if chat else {"max_model_len": length + 1, **self.options}
        return VLLMSource.load(
            name, end_of_text_token=self.end_of_text, chat=chat, dtype=self.dtype, **options
        )

    def load_reader(self, name: str, length: int, *, chat: bool = False) -> Reader:
        """Load the LM to compute hidden states of rows of `length` tokens.

        Args:
            name: A folder, a hub id or a GGUF file.
            length: Tokens per row.
            chat: Whether the rows are answers in chats, which end where turns do.

        Returns:
            The language model.

        Raises:
            InvalidFileError: If the GGUF file cannot be loaded.
            InvalidInputError: If the model cannot be loaded.
        """
        if is_gguf(name):
            return self._load_llama(name, length, chat=chat)
        return self.load_transformers(name, chat=chat)

    def _load_llama(self, name: str, length: int, *, chat: bool) -> LlamaSource:
        if self.engine != "transformers":
            raise InvalidInputError(
                f"{name} is a GGUF file, from which llama.cpp samples, not {self.engine}. Use the "
                f"default engine, or the folder or hub id of the model."
            )
        return LlamaSource.load(
            name,
            length,
            end_of_text_token=self.end_of_text,
            chat=chat,
            device=self.device,
            **self.options,
        )

    def load_transformers(self, name: str, *, chat: bool = False) -> TransformersSource:
        """Load the LM with transformers, which can compute hidden states.

        Args:
            name: A folder or a hub id.
            chat: Whether the rows are answers in chats, which end where turns do.

        Returns:
            The language model.

        Raises:
            InvalidInputError: If the model cannot be loaded.
        """
        options = self.reader_options
        if options is None:
            same_engine = self.engine == "transformers"
            options = self.options if same_engine else tokenizer_options(self.options)
        return TransformersSource.load(
            name,
            end_of_text_token=self.end_of_text,
            chat=chat,
            dtype=self.dtype,
            device=self.device,
            **options,
        )
