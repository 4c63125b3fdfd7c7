"""A tiny real LM: a Llama of random weights with a word-level tokenizer, saved as a folder."""

from collections.abc import Sequence
from pathlib import Path

WORDS = ["<|endoftext|>", *(f"w{number}" for number in range(63))]


def write_tiny_lm(folder: Path, vocabulary: Sequence[str] = WORDS) -> Path:
    """Write model and tokenizer as transformers would load them from a hub."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(
        WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="w0")
    )
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, eos_token=WORDS[0]
    )
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)  # next tokens differ in likelihood
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
