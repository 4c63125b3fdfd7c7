"""A tiny classifier: a BERT with random weights and the vocabulary of the tiny LM."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tiny_lm import WORDS, word_tokenizer

MAX_LENGTH = 64


def write_tiny_classifier(folder: Path, labels: Sequence[str]) -> Path:
    """Save model and tokenizer in a folder that transformers loads."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=0,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer = word_tokenizer(model_max_length=MAX_LENGTH, pad_token=WORDS[0])
    tokenizer.save_pretrained(folder)
    return folder
