"""Frequencies of the tokens of a language model."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

from foretrace.engines.prompts import encode_prompts, start_ids
from foretrace.engines.transformers import unigram_hmm
from foretrace.vocabulary import fingerprint
from tiny_lm import WORDS, word_tokenizer


def test_frequencies_are_those_of_the_lm(model: PreTrainedModel) -> None:
    """The LM emits each token that often, in texts of its own."""
    tokenizer, seen = word_tokenizer(), []
    hmm = unigram_hmm(model, tokenizer, on_progress=lambda *update: seen.append(update))
    assert seen[-1] == ("token frequencies", 8, 8, "tokens")
    assert hmm.config.eos_token_ids == (0,)
    assert hmm.config.tokenizer_fingerprint == fingerprint(tokenizer.get_vocab())
    assert hmm.config.distillation == {"method": "unigram"}
    assert hmm.vocab_size == model.config.vocab_size
    assert torch.equal(
        hmm.emission.predict(torch.ones(1, 1)),
        unigram_hmm(model, tokenizer).emission.predict(torch.ones(1, 1)),
    )
    torch.manual_seed(0)
    texts = model.generate(  # type: ignore[operator]
        torch.zeros(500, 1, dtype=torch.long),
        attention_mask=torch.ones(500, 1),
        max_new_tokens=8,
        do_sample=True,
        top_k=0,
        bad_words_ids=[[0]],
    )
    counted = torch.bincount(texts[:, 1:].flatten(), minlength=hmm.vocab_size) / 4000
    assert float((hmm.token_frequencies() - counted).abs().sum()) < 0.25


def test_texts_begin_as_the_tokenizer_begins_them() -> None:
    """A tokenizer that adds a token to every text adds it to an empty one, too."""
    tokenizer = word_tokenizer()
    assert start_ids(tokenizer) == [0]
    assert start_ids(tokenizer, [5]) == [5]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="w7 $A", special_tokens=[("w7", WORDS.index("w7"))]
    )
    assert start_ids(tokenizer, [5]) == encode_prompts(tokenizer, [""])[0] == [WORDS.index("w7")]
