"""The classifier of whole texts reads hidden states of the LM."""

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from foretrace.engines.transformers import hidden_states
from foretrace.engines.transformers.hidden_states import MAX_TOKENS
from foretrace.engines.transformers.text_classifier import TextClassifier, mean_states
from foretrace.errors import InvalidInputError
from tiny_lm import WORDS, word_tokenizer

TOKENIZER = word_tokenizer()


def written(words: list[str], count: int, seed: int) -> list[str]:
    """Texts of 5 to 30 words."""
    source = random.Random(seed)
    return [" ".join(source.choices(words, k=source.randint(5, 30))) for _ in range(count)]


def test_it_tells_texts_apart(model: PreTrainedModel) -> None:
    sides = WORDS[1:32], WORDS[20:]
    texts = [*written(sides[0], 300, 0), *written(sides[1], 60, 1)]
    scores = [0.9] * 300 + [0.2] * 60
    seen: list[tuple[int, int]] = []
    fitted = TextClassifier.fit(
        model, TOKENIZER, texts, scores, on_progress=lambda *update: seen.append(update)
    )
    assert fitted.num_texts == 120  # as many of each side
    assert seen[-1] == (120, 120)
    assert fitted.auc > 0.9
    new = [*written(sides[0], 20, 2), *written(sides[1], 20, 3)]
    probabilities = np.array(fitted.score(new))
    assert probabilities[:20].mean() > 0.7 > 0.3 > probabilities[20:].mean()


def test_labels_without_meaning_have_no_auc(model: PreTrainedModel) -> None:
    texts = written(WORDS[1:], 200, 0)
    scores = [random.Random(text).random() for text in texts]
    assert 0.3 < TextClassifier.fit(model, TOKENIZER, texts, scores).auc < 0.7


def test_copies_of_texts_are_held_out_together(model: PreTrainedModel) -> None:
    """Otherwise, random labels of texts that occur often would seem to have a meaning."""
    texts = written(WORDS[1:], 40, 0) * 6
    scores = [float(random.Random(text).random() < 0.5) for text in texts]
    assert TextClassifier.fit(model, TOKENIZER, texts, scores).auc < 0.75


def test_states_depend_on_the_text_alone(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*written(WORDS[1:], 20, 0), "", "w1", " ".join(WORDS[1:] * 3)]
    states = mean_states(model, TOKENIZER, texts)
    assert states.shape == (23, model.config.hidden_size)
    monkeypatch.setattr(hidden_states, "BATCH_TOKENS", 1)
    alone = mean_states(model, TOKENIZER, texts)
    np.testing.assert_allclose(states, alone, atol=1e-5)
    cut = " ".join((WORDS[1:] * 3)[:MAX_TOKENS])
    np.testing.assert_allclose(mean_states(model, TOKENIZER, [cut])[0], alone[-1], atol=1e-5)


def test_too_few_texts_are_refused(model: PreTrainedModel) -> None:
    texts = written(WORDS[1:], 40, 0)
    with pytest.raises(InvalidInputError, match="there are 5 and 35"):
        TextClassifier.fit(model, TOKENIZER, texts, [1.0] * 5 + [0.0] * 35)


@pytest.mark.slow
def test_it_reads_meaning_and_not_words(smollm2: Path) -> None:
    """It judges words that it was not fitted to: an attribute could not."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(smollm2)
    loaded.eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    praise, blame = (
        ["wonderful", "delightful", "superb", "charming", "excellent", "lovely"],
        ["terrible", "dreadful", "awful", "boring", "horrible", "poor"],
    )
    subjects = ["film", "meal", "hotel", "book", "concert", "walk", "class", "trip"]

    def sentences(words: list[str]) -> list[str]:
        return [f"We thought the {noun} was {word}." for noun in subjects for word in words]

    texts = [*sentences(praise[:4]), *sentences(blame[:4])]
    fitted = TextClassifier.fit(loaded, tokenizer, texts, [1.0] * 32 + [0.0] * 32)
    new = np.array(fitted.score([*sentences(praise[4:]), *sentences(blame[4:])]))
    assert fitted.auc > 0.95
    assert new[:16].min() > new[16:].max()
