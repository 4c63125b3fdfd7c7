"""A tiny sentence encoder: a BERT with random weights and mean pooling."""

from collections.abc import Sequence
from pathlib import Path


def write_tiny_encoder(folder: Path, texts: Sequence[str]) -> Path:
    """Save an encoder whose vocabulary is the words of `texts`, for sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    from tiny_lm import WORDS, word_tokenizer

    try:
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    except ImportError:  # before version 6
        from sentence_transformers.models import Pooling, Transformer  # type: ignore[no-redef]
    words = [WORDS[0], "w0", *sorted({word for text in texts for word in text.split()})]
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    bert = folder.with_name(f"{folder.name}-bert")
    BertModel(config).save_pretrained(bert)
    word_tokenizer(words, pad_token=WORDS[0]).save_pretrained(bert)
    SentenceTransformer(modules=[Transformer(str(bert)), Pooling(16)]).save(str(folder))
    return folder
