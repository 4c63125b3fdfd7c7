"""A tiny real LM: a Llama of random weights with a word-level tokenizer, saved as a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = ["<|endoftext|>", *(f"w{number}" for number in range(63))]


def word_tokenizer(
    vocabulary: Sequence[str] = WORDS, **options: object
) -> "PreTrainedTokenizerFast":
    """Make a tokenizer of words between spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="w0")
    )
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, eos_token=WORDS[0], **options
    )


def write_tiny_lm(folder: Path, vocabulary: Sequence[str] = WORDS, *, heads: int = 2) -> Path:
    """Write model and tokenizer as transformers would load them from a hub."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)  # next tokens differ in likelihood
    model.save_pretrained(folder)
    word_tokenizer(vocabulary).save_pretrained(folder)
    return folder
