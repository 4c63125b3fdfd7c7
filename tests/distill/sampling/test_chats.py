"""Answers in chats: the LM reads the whole chat, and a row begins after its last end of a turn."""

from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.chat import as_messages, encode_chat
from foretrace.distill.sampling.corpus import Corpus
from foretrace.distill.sampling.sample import Openings, SamplingConfig, sample
from foretrace.distill.sampling.source import find_ends
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.errors import InvalidInputError
from tiny_lm import chat_tokenizer, write_tiny_lm

END, ASSISTANT = 1, 4
CHATS = [as_messages("w1 w2"), as_messages("w3", "w4 w5 w6")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TransformersSource:
    folder = write_tiny_lm(tmp_path_factory.mktemp("chat-lm"), chat_tokenizer())
    return TransformersSource.load(str(folder), chat=True)


def test_the_end_of_a_turn_comes_first() -> None:
    tokenizer = chat_tokenizer()
    assert find_ends(tokenizer, None, chat=True, model_ends=[0, 7]) == (END, 0, 7)
    assert find_ends(tokenizer, None, chat=True, model_ends=None) == (END, 0)
    assert find_ends(tokenizer, "w1", chat=True, model_ends=0) == (END, 6, 0)
    assert find_ends(tokenizer, None, chat=False, model_ends=[0, 7]) == (0,)
    tokenizer.chat_template, tokenizer.eos_token = "{{ messages[0]['content'] }}", None
    with pytest.raises(InvalidInputError, match="--end-of-text"):
        find_ends(tokenizer, None, chat=True, model_ends=None)


def test_answers_follow_the_distribution_of_the_lm(source: TransformersSource) -> None:
    ids = encode_chat(source.tokenizer, CHATS[0])
    with torch.no_grad():
        logits = source.model(torch.tensor([ids])).logits[0, -1]
    expected = torch.softmax(logits.double(), -1)
    expected[END] += expected[0]  # one token stands for all ends
    expected[0] = 0.0
    contexts, prefixes = [ids[:-1], [END]] * 3000, [ids[-1:], [7, 8]] * 3000
    rows = source.draw(prefixes, 3, seed=1, contexts=contexts)
    observed = torch.bincount(rows[::2, 1], minlength=source.vocab_size)
    assert observed[0] == 0
    keep = expected > 0
    assert chisquare(observed[keep], expected[keep] / expected.sum() * 3000).pvalue > 1e-3
    assert (rows[::2, 0] == ASSISTANT).all()


def test_hidden_states_follow_the_context(source: TransformersSource) -> None:
    """Contexts have different lengths; the states equal those of each row alone."""
    contexts, rows = [[2, 7, END], [3, 8, 9, 10, END]], torch.tensor([[4, 11, 12], [4, 13, 14]])
    hidden = source.hidden(rows, contexts)
    for row, context in enumerate(contexts):
        ids = torch.tensor([[*context, *rows[row].tolist()]])
        with torch.no_grad():
            alone = source.model.base_model(ids).last_hidden_state[0, len(context) - 1 :]
        torch.testing.assert_close(hidden[row], alone)


def test_a_corpus_of_answers(source: TransformersSource, tmp_path: Path) -> None:
    config = SamplingConfig(sequences=120, length=8, shard_rows=60, prompted=0.1)
    corpus = sample(tmp_path, source, config, CHATS)
    assert corpus.manifest.eos_token_ids == (END, 0)
    assert corpus.manifest.sampling["prompted"] == 1.0
    whole = [encode_chat(source.tokenizer, chat) for chat in CHATS]
    for shard in Corpus(tmp_path).shards():
        rows, prompts = corpus.read(shard).long(), corpus.read_prompts(shard)
        assert prompts is not None
        assert prompts.lengths.tolist() == [1] * 60
        assert (rows[:, 0] == ASSISTANT).all()
        assert not (rows == 0).any()
        assert all([*context, ASSISTANT] in whole for context in prompts.contexts)
    again = SamplingConfig(sequences=120, length=8, shard_rows=60)
    sample(tmp_path, source, again, CHATS)  # the share of prompts does not apply to chats


def test_a_template_without_ends_is_cut_to_half_a_row(source: TransformersSource) -> None:
    config = SamplingConfig(sequences=4, length=8)
    openings = Openings(source, [[{"role": "user", "content": "w1"}]], config)
    assert openings.prompts[0].prefix == [ASSISTANT]
    template, source.tokenizer.chat_template = (
        source.tokenizer.chat_template,
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}"),
    )
    try:
        short, long = (
            Openings(source, [as_messages(text)], config).prompts[0]
            for text in ("w1 w2 w3", "w1 w2 w3 w4 w5 w6")
        )
    finally:
        source.tokenizer.chat_template = template
    assert (short.context, short.prefix) == ([6], [7, 8])  # one token predicts the first of the row
    assert (long.context, long.prefix) == ([6, 7], [8, 9, 10, 11])


def test_texts_and_chats_do_not_mix(source: TransformersSource) -> None:
    with pytest.raises(InvalidInputError, match="1 of 2 prompts are chats"):
        Openings(source, [CHATS[0], "w1"], SamplingConfig(sequences=4))
