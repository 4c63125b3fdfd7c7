"""A tiny LM: a Llama with random weights and a tokenizer, in the format of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from foretrace.hmm import HMM

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' END ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
INPUTS = ["input_ids", "attention_mask"]  # transformers 4 adds token types by default
WORDS = ["<|endoftext|>", *(f"w{index}" for index in range(63))]


def word_tokenizer(
    vocabulary: Sequence[str] = WORDS, **options: object
) -> "PreTrainedTokenizerFast":
    """Make a tokenizer whose tokens are words separated by spaces."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="w0")
    )
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=WORDS[0], model_input_names=INPUTS, **options
    )


def chat_tokenizer() -> "PreTrainedTokenizerFast":
    """Make a tokenizer of words with a chat template, in which `<|end|>` ends turns."""
    roles = ["<|end|>", "system", "user", "assistant"]
    return word_tokenizer(
        [WORDS[0], *roles, *WORDS[1 : -len(roles)]],
        additional_special_tokens=[roles[0]],
        chat_template=CHAT_TEMPLATE.replace("END", roles[0]),
    )


def byte_tokenizer(texts: Sequence[str], size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer, as GPT-2 has one, on some texts."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer, bpe.decoder = ByteLevel(add_prefix_space=False), Decoder()
    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=WORDS[:1],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=WORDS[0],
        model_input_names=INPUTS,
        chat_template=CHAT_TEMPLATE.replace("END", WORDS[0]),
    )


def tiny_model(tokenizer: "PreTrainedTokenizerFast", *, heads: int = 2) -> "LlamaForCausalLM":
    """Make the model; its weights do not depend on what ran before."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)  # so that next tokens differ in likelihood
    return model


def write_tiny_lm(
    folder: Path, tokenizer: "PreTrainedTokenizerFast | None" = None, *, heads: int = 2
) -> Path:
    """Write model and tokenizer into a folder that transformers can load."""
    tokenizer = tokenizer or word_tokenizer()
    tiny_model(tokenizer, heads=heads).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_hmm(tokenizer: "PreTrainedTokenizerFast", states: int = 8) -> "HMM":
    """Make an HMM with random parameters that records the tokenizer's fingerprint."""
    from foretrace.hmm import HMM, HMMConfig
    from foretrace.vocabulary import fingerprint

    hmm = HMM.random(states, len(tokenizer), eos_token_id=0, seed=0)
    config = HMMConfig(eos_token_ids=(0,), tokenizer_fingerprint=fingerprint(tokenizer.get_vocab()))
    return HMM(hmm.initial, hmm.transition, hmm.emission, config)
