"""A tiny real LM: a Llama of random weights with a tokenizer of its own, saved as a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from foretrace.hmm import HMM

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
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


def byte_tokenizer(texts: Sequence[str], size: int) -> "PreTrainedTokenizerFast":
    """Make a tokenizer of bytes and what they often come to in some texts, as GPT-2's is."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(BPE())
    pieces.pre_tokenizer, pieces.decoder = ByteLevel(add_prefix_space=False), Decoder()
    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=WORDS[:1],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=pieces, eos_token=WORDS[0], chat_template=CHAT
    )


def write_tiny_lm(
    folder: Path, tokenizer: "PreTrainedTokenizerFast | None" = None, *, heads: int = 2
) -> Path:
    """Write model and tokenizer as transformers would load them from a hub."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or word_tokenizer()
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
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)  # next tokens differ in likelihood
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_hmm(tokenizer: "PreTrainedTokenizerFast", states: int = 8) -> "HMM":
    """Make an HMM of random weights that knows a tokenizer for its own."""
    from foretrace.hmm import HMM, HMMConfig
    from foretrace.vocabulary import fingerprint

    hmm = HMM.random(states, len(tokenizer), eos_token_id=0, seed=0)
    config = HMMConfig(eos_token_ids=(0,), tokenizer_fingerprint=fingerprint(tokenizer.get_vocab()))
    return HMM(hmm.initial, hmm.transition, hmm.emission, config)
