"""Test fits: they recover known weights, and refuse bad input."""

from typing import Any

import numpy as np
import pytest
import torch

from foretrace.attribute import Attribute, FitConfig, LogitAffine
from foretrace.attribute.fitting import fit, products
from foretrace.attribute.fitting.examples import Examples
from foretrace.attribute.fitting.split import Split
from foretrace.errors import InvalidInputError

VOCAB = 12
TRUE = torch.tensor([0.1, 0.4, 0.8] + [1.0] * (VOCAB - 3), dtype=torch.float64)
ONE_TOKEN = [[token] for token in range(VOCAB)]


def scored_texts(count: int = 4000, seed: int = 0) -> tuple[list[list[int]], list[float]]:
    """Return texts of 3 to 9 tokens, scored by one product of weights."""
    random = np.random.default_rng(seed)
    texts = [random.integers(0, VOCAB, random.integers(3, 10)).tolist() for _ in range(count)]
    return texts, [float(TRUE[text].prod()) for text in texts]


@pytest.mark.parametrize("objective", ["cross-entropy", "log-mse"])
def test_a_fit_recovers_the_weights_behind_the_scores(objective: str) -> None:
    texts, scores = scored_texts()
    config = FitConfig(objective=objective, transform=LogitAffine(), penalty=0.01)
    fitted = Attribute.fit(texts, scores, vocab_size=VOCAB, config=config)
    torch.testing.assert_close(fitted.probability(ONE_TOKEN), TRUE, rtol=0.02, atol=0.01)
    assert fitted.config.fit["auc"] > 0.999
    assert fitted.config.fit["calibration_error"] < 0.01
    assert [effect.token for effect in fitted.top_tokens(3)] == [0, 1, 2]


def test_a_mixture_fits_better_than_one_product() -> None:
    """The scores are 0.6 times one product plus 0.4 times another."""
    texts, scores = scored_texts()
    other = TRUE.flip(0)
    scores = [0.6 * s + 0.4 * float(other[t].prod()) for t, s in zip(texts, scores, strict=True)]
    errors = {}
    for terms in (1, 2):
        config = FitConfig(terms=terms, transform=LogitAffine(), penalty=0.01)
        fitted = Attribute.fit(texts, scores, vocab_size=VOCAB, config=config)
        off = fitted.probability(texts) - torch.tensor(scores, dtype=torch.float64)
        errors[terms] = float(off.abs().mean())
        assert len(fitted.terms) == terms
        assert float(fitted.terms.coefficients.sum()) == pytest.approx(1.0)
        assert (fitted.terms.coefficients > 0).all()
    assert errors[2] < 0.2 * errors[1]


def test_a_fit_by_absence_is_1_minus_a_product() -> None:
    texts, scores = scored_texts()
    examples = Examples.from_scores(texts, [1 - score for score in scores], VOCAB)
    config = FitConfig(objective="cross-entropy", transform=LogitAffine(), penalty=0.01)
    split = Split.of(examples, None, 0.1, 0)
    candidate = products.fit_products(split.fitting, split.held_out, config, by_absence=True)
    fitted = Attribute(candidate.terms)
    torch.testing.assert_close(fitted.probability(ONE_TOKEN), 1 - TRUE, rtol=0.02, atol=0.01)
    assert fitted.terms.coefficients.tolist() == [1.0, -1.0]
    assert candidate.auc is not None
    assert candidate.auc > 0.999


def test_rare_tokens_get_no_extreme_weight() -> None:
    texts, scores = scored_texts()
    rare = VOCAB  # in two texts without the attribute
    texts += [[rare, 5], [rare, 6]]
    scores += [0.0, 0.0]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB + 1,
        "config": FitConfig(objective="cross-entropy", transform=LogitAffine()),
        "validation": scored_texts(100, 1),
    }
    fitted = Attribute.fit(texts, scores, **settings)
    assert 0.2 < float(fitted.probability([[rare]])[0]) < 0.6
    once = Attribute.fit(texts[:-1], scores[:-1], **settings)
    assert float(once.probability([[rare]])[0]) == 1.0


FLAT = LogitAffine(1e-9, 0.0)  # makes all scores 0.5, so that nothing can be learned


@pytest.mark.parametrize(
    ("transforms", "inverted", "expected"),
    [
        ((FLAT, LogitAffine()), False, LogitAffine()),
        ((LogitAffine(), FLAT), False, LogitAffine()),
        ((LogitAffine(), LogitAffine(1.01, 0.0)), False, LogitAffine()),  # no clear gain
        ((LogitAffine(), FLAT), True, FLAT),  # the validation texts decide
    ],
)
def test_the_transform_is_chosen_on_validation_texts(
    monkeypatch: pytest.MonkeyPatch,
    transforms: tuple[LogitAffine, ...],
    inverted: bool,
    expected: LogitAffine,
) -> None:
    monkeypatch.setattr(products, "TRANSFORMS", transforms)
    texts, scores = scored_texts(300, 1)
    validation = (texts, [1 - score for score in scores] if inverted else scores)
    config = FitConfig(objective="cross-entropy")
    fitted = Attribute.fit(
        *scored_texts(1000), vocab_size=VOCAB, validation=validation, config=config
    )
    assert fitted.config.fit["transform"] == {"scale": expected.scale, "shift": expected.shift}
    assert fitted.config.fit["transform_chosen"]


def test_a_transform_in_the_config_is_used() -> None:
    config = FitConfig(transform=LogitAffine(5.0, -1.0))
    record = Attribute.fit(*scored_texts(500), vocab_size=VOCAB, config=config).config.fit
    assert record["transform"] == {"scale": 5.0, "shift": -1.0}
    assert not record["transform_chosen"]


def test_windows_of_one_text_are_held_out_together() -> None:
    texts, scores = scored_texts(1000)
    groups = [index // 4 for index in range(1000)]
    split = Split.of(Examples.from_scores(texts, scores, VOCAB, groups), None, 0.1, 0)
    fitting, held_out = set(split.fitting.groups), set(split.held_out.groups)
    assert not fitting & held_out
    assert sorted(fitting | held_out) == sorted(set(groups))
    record = Attribute.fit(texts, scores, vocab_size=VOCAB, groups=groups).config.fit
    assert record["texts"] + record["held_out_texts"] == 250
    assert record["windows"] + record["held_out_windows"] == 1000


def test_validation_texts_are_held_out() -> None:
    fitted = Attribute.fit(*scored_texts(500), vocab_size=VOCAB, validation=scored_texts(70, 1))
    assert (fitted.config.fit["texts"], fitted.config.fit["held_out_texts"]) == (500, 70)


def test_fits_are_deterministic() -> None:
    texts, scores = scored_texts(500)
    one, two = (Attribute.fit(texts, scores, vocab_size=VOCAB) for _ in range(2))
    assert torch.equal(one.terms.log_weights, two.terms.log_weights)
    assert one.config == two.config


def test_a_label_of_one_text_is_fitted() -> None:
    texts, _ = scored_texts(80)
    labels = ["often", "also"] * 39 + ["once", "twice"]
    for seed in range(20):
        config = FitConfig(objective="cross-entropy", seed=seed)
        fitted = list(Attribute.fit_each(texts, labels, vocab_size=VOCAB, config=config))
        assert [attribute.name for attribute in fitted] == ["also", "often", "once", "twice"]


def test_the_source_is_recorded() -> None:
    texts, scores = scored_texts(100)
    fitted = Attribute.fit(texts, scores, vocab_size=VOCAB, source={"data": "mine"})
    assert fitted.config.fit["source"] == {"data": "mine"}


def test_fit_each_fits_one_attribute_per_label() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 600)
    texts = [[int(label), *random.integers(3, VOCAB, 5).tolist()] for label in labels]
    names = [f"role {label}" for label in labels]
    fitted = {one.name: one for one in Attribute.fit_each(texts, names, vocab_size=VOCAB)}
    assert list(fitted) == ["role 0", "role 1", "role 2"]
    for label, attribute in enumerate(fitted.values()):
        assert attribute.top_tokens(1)[0].token == label
        assert attribute.config.fit["auc"] > 0.99


def balanced_texts() -> tuple[list[list[int]], list[float]]:
    """Return texts scored by words for and against, which no product can fit."""
    random = np.random.default_rng(0)
    rewards = np.linspace(-2, 2, VOCAB)
    texts = [random.integers(0, VOCAB, random.integers(3, 10)).tolist() for _ in range(1000)]
    log_odds = np.array([rewards[list(set(text))].sum() for text in texts])
    return texts, (1 / (1 + np.exp(-log_odds))).tolist()


def test_auto_chooses_evidence_unless_a_product_ranks_clearly_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attribute = Attribute.fit(*balanced_texts(), vocab_size=VOCAB)
    record = attribute.config.fit
    assert record["objective"] == "evidence"
    assert record["auc"] == record["auc_evidence"] > record["auc_product"] + products.MIN_AUC_GAIN
    assert record["reason"].startswith("Chose evidence: on held-out texts")
    assert len(attribute.evidence) == 1
    record = Attribute.fit(*scored_texts(1000), vocab_size=VOCAB).config.fit
    assert record["objective"] == "evidence"  # both are about equal
    gain = record["auc_product"] - record["auc_evidence"]
    monkeypatch.setattr(fit, "MIN_AUC_GAIN", gain - 1e-6)
    record = Attribute.fit(*scored_texts(1000), vocab_size=VOCAB).config.fit
    assert record["objective"] == "cross-entropy"
    assert record["auc"] == record["auc_product"]
    assert record["reason"].startswith("Chose a product: on held-out texts")
    embeddings = torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(0))
    record = Attribute.fit(
        *scored_texts(1000),
        vocab_size=VOCAB,
        frequencies=torch.ones(VOCAB),
        embeddings=embeddings,
    ).config.fit
    assert record["objective"] == "evidence"
    assert "rewards that use the LM" in record["reason"]


def test_auto_chooses_evidence_for_labels_if_there_are_embeddings() -> None:
    """Without a comparison, which takes long."""
    random = np.random.default_rng(0)
    texts = [random.integers(0, VOCAB, 5).tolist() for _ in range(300)]
    labels = [f"role {text[0] % 3}" for text in texts]
    fitted = Attribute.fit_each(
        texts,
        labels,
        vocab_size=VOCAB,
        frequencies=torch.ones(VOCAB),
        embeddings=torch.randn(VOCAB, 4),
    )
    for one in fitted:
        assert "rewards that use the LM" in one.config.fit["reason"]
        assert "right_first" in one.config.fit
        assert "right_first_product" not in one.config.fit


def test_auto_means_a_product_if_there_are_several_terms() -> None:
    attribute = Attribute.fit(*balanced_texts(), vocab_size=VOCAB, config=FitConfig(terms=2))
    assert not attribute.evidence
    assert attribute.config.fit["objective"] == "cross-entropy"
    assert "products only" in attribute.config.fit["reason"]


@pytest.mark.parametrize("objective", ["auto", "cross-entropy", "log-mse", "evidence"])
def test_kept_tokens_do_not_decide(objective: str) -> None:
    """Token 1 always occurs with token 0. Without token 0, it takes its place."""
    texts, scores = scored_texts(1000)
    texts = [[*text, 1] if 0 in text else [token for token in text if token != 1] for text in texts]
    config = FitConfig(objective=objective, keep=[0, 0])
    attribute = Attribute.fit(texts, scores, vocab_size=VOCAB, config=config)
    assert 0 not in [effect.token for effect in attribute.top_tokens(VOCAB)]
    assert attribute.top_tokens(1)[0].token == 1
    assert attribute.config.fit["keep"] == 1
    labels = [f"role {score > 0.5}" for score in scores]
    for one in Attribute.fit_each(texts, labels, vocab_size=VOCAB, config=config):
        assert 0 not in [effect.token for effect in one.top_tokens(VOCAB)]


def test_kept_tokens_outside_the_vocabulary_are_refused() -> None:
    texts, scores = scored_texts(100)
    for keep in ([VOCAB], [-1]):
        with pytest.raises(InvalidInputError, match="another tokenizer"):
            Attribute.fit(texts, scores, vocab_size=VOCAB, config=FitConfig(keep=keep))


@pytest.mark.parametrize(
    ("texts", "scores", "expected"),
    [
        ([[1], []], [0.0, 1.0], "no tokens"),
        ([], [], "no texts"),
        ([[1], [2]], [0.5], "one for each text"),
        ([[1], [2]], [0.0, 1.5], r"probabilities in \[0, 1\]"),
        ([[1], [2]], [0.0, float("nan")], r"probabilities in \[0, 1\]"),
        ([[1]] * 50, [0.5] * 50, "scores are equal"),
        ([[1], [2]], [0.0, 1.0], "2 texts are too few"),
        ([[1], [VOCAB]], [0.0, 1.0], "another tokenizer"),
        ([[1], [-1]], [0.0, 1.0], "another tokenizer"),
        ([[1.5], [2]], [0.0, 1.0], "integers"),
        (["a", "b"], [0.0, 1.0], "token ids"),
        ("ab", [0.0, 1.0], "token ids"),
        ([1, 2], [0.0, 1.0], "shape"),
    ],
)
def test_bad_input_is_refused(texts: Any, scores: list[float], expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        Attribute.fit(texts, scores, vocab_size=VOCAB)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "mse"},
        {"terms": 0},
        {"terms": 2, "objective": "log-mse"},
        {"terms": 2, "objective": "evidence"},
        {"keep": ["women"]},
        {"keep": 7},
        {"penalty": -1.0},
        {"penalty": float("inf")},
        {"seed": -1},
        {"min_texts": 0},
        {"held_out": 1.0},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        FitConfig(**settings)  # type: ignore[arg-type]


def test_texts_may_be_arrays_or_tensors() -> None:
    texts, scores = scored_texts(200)
    equal = [text[:3] for text in texts]
    expected = Attribute.fit(equal, scores, vocab_size=VOCAB).terms.log_weights
    for given in (np.array(equal), torch.tensor(equal), [torch.tensor(text) for text in equal]):
        fitted = Attribute.fit(given, np.array(scores), vocab_size=VOCAB)  # type: ignore[arg-type]
        assert torch.equal(fitted.terms.log_weights, expected)


def test_a_single_label_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no others"):
        next(Attribute.fit_each([[1], [2]], ["a", "a"], vocab_size=VOCAB))
