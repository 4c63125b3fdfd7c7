"""Test fits of evidence: they recover known log-odds, of scores and of labels."""

import numpy as np
import pytest
import torch

from foretrace.attribute import Attribute, FitConfig
from foretrace.attribute.fitting import fit
from foretrace.errors import InvalidInputError

VOCAB = 12
BIAS = -0.5
REWARDS = torch.tensor([2.0, -1.5, 1.0] + [0.0] * (VOCAB - 3), dtype=torch.float64)
LOOSE = FitConfig(objective="evidence", penalty=1e-4)


def texts_with_log_odds(count: int = 6000) -> tuple[list[list[int]], torch.Tensor]:
    """Return texts of 3 to 9 tokens, and their log-odds; a token counts once."""
    random = np.random.default_rng(0)
    texts = [random.integers(0, VOCAB, random.integers(3, 10)).tolist() for _ in range(count)]
    log_odds = torch.tensor([BIAS + float(REWARDS[list(set(text))].sum()) for text in texts])
    return texts, log_odds.double()


def fitted_rewards(attribute: Attribute) -> torch.Tensor:
    rewards = torch.zeros(VOCAB, dtype=torch.float64)
    evidence = attribute.evidence[0]
    rewards[evidence.tokens.long()] = evidence.rewards.double()
    return rewards


def test_soft_scores_give_back_the_log_odds() -> None:
    texts, log_odds = texts_with_log_odds()
    attribute = Attribute.fit(texts, log_odds.sigmoid(), vocab_size=VOCAB, config=LOOSE)
    torch.testing.assert_close(fitted_rewards(attribute), REWARDS, rtol=0, atol=0.06)
    assert attribute.evidence[0].bias == pytest.approx(BIAS, abs=0.06)
    assert attribute.evidence[0].first_only
    assert len(attribute.terms.tokens) == 0
    record = attribute.config.fit
    assert record["objective"] == "evidence"
    assert record["auc"] > 0.99
    assert record["calibration_error"] < 0.02
    assert record["tokens_with_weight"] == 3  # negligible rewards are dropped


def test_hard_labels_give_back_the_log_odds() -> None:
    texts, log_odds = texts_with_log_odds(20_000)
    chance = torch.rand(len(texts), generator=torch.Generator().manual_seed(0))
    scores = (chance < log_odds.sigmoid()).double()
    attribute = Attribute.fit(texts, scores, vocab_size=VOCAB, config=LOOSE)
    torch.testing.assert_close(fitted_rewards(attribute), REWARDS, rtol=0, atol=0.15)


def test_a_larger_penalty_gives_smaller_rewards() -> None:
    texts, log_odds = texts_with_log_odds(500)
    sizes = []
    for penalty in (0.0, 0.1, 1.0, 10.0):
        config = FitConfig(objective="evidence", penalty=penalty)
        attribute = Attribute.fit(texts, log_odds.sigmoid(), vocab_size=VOCAB, config=config)
        sizes.append(float(attribute.evidence[0].rewards.abs().sum()))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.5 * sizes[0]


def test_frequent_tokens_pay_for_their_rewards() -> None:
    texts, log_odds = texts_with_log_odds(2000)
    rare, frequent = 0, 2  # both decide
    frequencies = torch.full((VOCAB,), 1e-6).index_fill(0, torch.tensor(frequent), 0.5)
    rewards = {}
    for name, given in (("plain", None), ("priced", frequencies)):
        config = FitConfig(objective="evidence", penalty=0.1)
        attribute = Attribute.fit(
            texts, log_odds.sigmoid(), vocab_size=VOCAB, config=config, frequencies=given
        )
        assert attribute.config.fit["price_aware"] == (given is not None)
        rewards[name] = fitted_rewards(attribute)
    assert rewards["priced"][frequent] < 0.5 * rewards["plain"][frequent]
    assert rewards["priced"][rare] > 0.9 * rewards["plain"][rare]


def texts_of_similar_tokens() -> tuple[list[list[int]], list[float], torch.Tensor]:
    """Return texts of 200 tokens, whose rewards are a direction of their embeddings."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(200, 6, generator=generator)
    texts = torch.randint(0, 150, (400, 8), generator=generator)  # 50 tokens are in no text
    log_odds = embeddings[texts, 0].sum(1)
    return texts.tolist(), (2 * log_odds).sigmoid().tolist(), embeddings


def test_similar_tokens_share_a_reward() -> None:
    texts, scores, embeddings = texts_of_similar_tokens()
    frequencies = torch.full((200,), 1 / 200).index_fill(0, torch.tensor([198, 199]), 1e-12)
    config = FitConfig(objective="evidence", keep=(150, 151))
    words, shared = (
        Attribute.fit(
            texts,
            scores,
            vocab_size=200,
            config=config,
            frequencies=frequencies,
            embeddings=given,
        )
        for given in (None, embeddings)
    )
    assert shared.config.fit["auc"] > words.config.fit["auc"]
    assert shared.config.fit["embeddings"]
    rewards = torch.zeros(200)
    rewards[shared.evidence[0].tokens.long()] = shared.evidence[0].rewards
    unseen = rewards[152:198]
    assert torch.corrcoef(torch.stack([unseen, embeddings[152:198, 0]]))[0, 1] > 0.95
    assert rewards[[150, 151]].abs().max() == 0  # must not decide
    assert rewards[[198, 199]].abs().max() < 1e-3 * unseen.abs().max()  # the LM never writes them


def test_labels_share_rewards_by_embeddings() -> None:
    texts, scores, embeddings = texts_of_similar_tokens()
    labels = ["for" if score > 0.5 else "against" for score in scores]
    config = FitConfig(objective="evidence")
    rank = []
    for given in (None, embeddings):
        fitted = Attribute.fit_each(texts, labels, vocab_size=200, config=config, embeddings=given)
        rank.append(next(iter(fitted)).config.fit["auc"])
    assert rank[1] > rank[0]


def test_samples_add_their_rewards_at_equal_price() -> None:
    texts, log_odds = texts_with_log_odds(2000)
    frequencies = torch.full((VOCAB,), 1 / VOCAB)
    only_in_samples = 7
    scores = log_odds.sigmoid().tolist()
    samples = [[only_in_samples, 8, 9], [8, 9, 10]] * 100
    plain, taught = (
        Attribute.fit(
            texts,
            scores,
            vocab_size=VOCAB,
            config=LOOSE,
            frequencies=frequencies,
            samples=given,
        )
        for given in (None, (samples, [0.9, 0.1] * 100))
    )
    before, after = fitted_rewards(plain), fitted_rewards(taught)
    assert before[only_in_samples] == 0
    scale = after[0] / before[0]  # fitted anew
    added = after / scale - before
    assert added[only_in_samples] > 1
    assert float(added.var()) == pytest.approx(float(before.var()), rel=0.01)
    assert taught.config.fit["samples"] == 200
    probabilities = taught.probability(texts).mean()
    assert float(probabilities) == pytest.approx(float(np.mean(scores)), abs=0.02)


def test_samples_need_frequencies() -> None:
    with pytest.raises(InvalidInputError, match="frequencies"):
        Attribute.fit(
            [[0], [1]] * 30, [0.0, 1.0] * 30, vocab_size=VOCAB, samples=([[0], [1]], [0.1, 0.9])
        )


@pytest.mark.parametrize("embeddings", [torch.zeros(3), torch.full((VOCAB, 2), float("nan"))])
def test_embeddings_that_are_no_finite_matrix_are_refused(embeddings: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="Embeddings must be finite"):
        Attribute.fit([[0], [1]] * 30, [0.0, 1.0] * 30, vocab_size=VOCAB, embeddings=embeddings)


def test_labels_pay_for_the_rewards_of_frequent_tokens() -> None:
    texts, labels = labelled_texts()
    sizes = []
    for frequencies in (
        None,
        torch.full((VOCAB + 3,), 1 / VOCAB),
    ):  # of an LM with a padded vocabulary
        first, *_ = Attribute.fit_each(
            texts, labels, vocab_size=VOCAB, config=LOOSE, frequencies=frequencies
        )
        sizes.append(float(fitted_rewards(first).abs().sum()))
    assert sizes[1] < sizes[0]


def test_frequencies_must_be_one_number_per_token() -> None:
    texts, log_odds = texts_with_log_odds(100)
    with pytest.raises(InvalidInputError, match=r"Frequencies must be .* \(V,\)"):
        Attribute.fit(texts, log_odds.sigmoid(), vocab_size=VOCAB, frequencies=-torch.ones(VOCAB))


def test_rare_tokens_get_no_reward() -> None:
    texts, log_odds = texts_with_log_odds(500)
    scores = [*log_odds.sigmoid().tolist(), 1.0, 1.0]
    texts += [[VOCAB, 3], [VOCAB, 4]]
    for min_texts, rewarded in ((2, True), (3, False)):
        config = FitConfig(objective="evidence", penalty=0.01, min_texts=min_texts, held_out=0.01)
        validation = (texts[:100], scores[:100])
        attribute = Attribute.fit(
            texts, scores, vocab_size=VOCAB + 1, config=config, validation=validation
        )
        assert (VOCAB in attribute.evidence[0].tokens.tolist()) == rewarded


def test_texts_without_usable_tokens_give_a_constant() -> None:
    config = FitConfig(objective="evidence", min_texts=9)
    texts, scores = [[token] for token in range(VOCAB)] * 2, [0.0, 1.0, 1.0, 1.0] * (VOCAB // 2)
    attribute = Attribute.fit(texts, scores, vocab_size=VOCAB, config=config)
    assert len(attribute.evidence[0].tokens) == 0
    assert float(attribute.probability([0])) == pytest.approx(0.75, abs=0.05)


def labelled_texts(count: int = 900) -> tuple[list[list[int]], list[str]]:
    """Return texts of three labels; 4 of 12 tokens are frequent in each."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, count)
    frequent = np.arange(VOCAB) % 3 == labels[:, None]
    present = random.random((count, VOCAB)) < np.where(frequent, 0.7, 0.2)
    present[:, -1] |= ~present.any(1)  # no text is empty
    return [np.flatnonzero(row).tolist() for row in present], [f"role {k}" for k in labels]


def test_the_evidence_of_labels_ranks_them_as_the_softmax_does() -> None:
    texts, labels = labelled_texts()
    config = FitConfig(objective="evidence", penalty=0.01)
    fitted = list(Attribute.fit_each(texts, labels, vocab_size=VOCAB, config=config))
    assert [one.name for one in fitted] == ["role 0", "role 1", "role 2"]
    table = torch.stack([one.probability(texts) for one in fitted])
    truth = torch.tensor([int(label[-1]) for label in labels])
    right = float((table.argmax(0) == truth).double().mean())
    assert right > 0.85
    assert fitted[0].config.fit["right_first"] == pytest.approx(right, abs=0.1)
    # Each alone is a classifier of its label against the rest.
    assert float(table.sum(0).mean()) == pytest.approx(1.0, abs=0.05)
    for number, attribute in enumerate(fitted):
        assert attribute.config.fit["auc"] > 0.9
        rewards = fitted_rewards(attribute)
        assert (rewards.argsort(descending=True)[:4] % 3 == number).all()
        own = table[number][truth == number].mean()
        assert own > 2 * table[number][truth != number].mean()
    assert torch.stack([fitted_rewards(one) for one in fitted]).sum(0).abs().max() < 0.1


def test_the_evidence_of_two_labels_is_one_logistic_regression() -> None:
    texts, labels = labelled_texts()
    pairs = [(t, label) for t, label in zip(texts, labels, strict=True) if label != "role 2"]
    texts, labels = [text for text, _ in pairs], [label for _, label in pairs]
    config = FitConfig(objective="evidence", penalty=1e-3)
    one, two = Attribute.fit_each(texts, labels, vocab_size=VOCAB, config=config)
    torch.testing.assert_close(one.probability(texts), (~two).probability(texts), rtol=0, atol=0.02)
    scores = [float(label == "role 0") for label in labels]
    alone = Attribute.fit(texts, scores, vocab_size=VOCAB, config=config)
    torch.testing.assert_close(one.probability(texts), alone.probability(texts), rtol=0, atol=0.05)


def test_labels_are_fitted_as_evidence_unless_products_rank_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts, labels = labelled_texts()
    fitted = list(Attribute.fit_each(texts, labels, vocab_size=VOCAB))
    for attribute in fitted:
        record = attribute.config.fit
        assert record["objective"] == "evidence"
        assert record["compared_labels"] == 3
        assert record["right_first_evidence"] >= record["right_first_product"]
        assert record["auc_evidence"] == record["auc"]
        assert 0.5 < record["auc_product"] <= 1.0
        assert record["reason"].startswith("Chose evidence: the right one of 3 labels is first")
    shares = [0.9, 0.9, 0.8]  # evidence of all labels; products and evidence of those compared
    monkeypatch.setattr(fit, "right_first", lambda *_: shares.pop(0))
    monkeypatch.setattr(fit, "MAX_COMPARED", 2)  # the third product is fitted when it is chosen
    for attribute in Attribute.fit_each(texts, labels, vocab_size=VOCAB):
        assert attribute.config.fit["objective"] == "cross-entropy"
        assert attribute.config.fit["by_absence"]
        assert attribute.config.fit["reason"].startswith("Chose products")
        assert attribute.terms.coefficients.tolist() == [1.0, -1.0]


def test_a_product_setting_fits_products_per_label() -> None:
    texts, labels = labelled_texts(300)
    for config in (FitConfig(terms=2), FitConfig(objective="cross-entropy")):
        for attribute in Attribute.fit_each(texts, labels, vocab_size=VOCAB, config=config):
            assert not attribute.evidence
            assert attribute.config.fit["objective"] == "cross-entropy"


def test_validation_texts_of_unknown_labels_do_not_decide() -> None:
    texts, labels = labelled_texts(300)
    validation = (texts[:20], ["nobody"] * 20)
    for attribute in Attribute.fit_each(texts, labels, vocab_size=VOCAB, validation=validation):
        assert attribute.config.fit["auc"] is None
        assert attribute.config.fit["right_first"] is None
        assert attribute.config.fit["objective"] == "evidence"
