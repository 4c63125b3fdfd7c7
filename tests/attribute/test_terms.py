"""The algebra of terms equals arithmetic on the probabilities of all short texts."""

from itertools import product

import pytest
import torch

from foretrace.attribute import terms as terms_module
from foretrace.attribute.terms import MAX_TERMS, MAX_TOTAL, Terms, signed_sum
from foretrace.errors import InvalidInputError
from tiny_attributes import attributes

TEXTS = [list(text) for length in range(4) for text in product(range(4), repeat=length)]


def terms(coefficients: list[float], tokens: list[int], weights: list[list[float]]) -> Terms:
    return Terms(
        torch.tensor(coefficients, dtype=torch.float64),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(weights, dtype=torch.float64).reshape(len(coefficients), len(tokens)).log(),
    )


def values(some: Terms, texts: list[list[int]] = TEXTS) -> torch.Tensor:
    """Return the value of every text: (texts,)."""
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.long)
    index = torch.tensor([i for i, text in enumerate(texts) for _ in text], dtype=torch.long)
    return some.probability(some.sums(tokens, index, len(texts)))


TWO = terms([0.25, 0.5], [1, 3], [[0.5, 1.0], [0.2, 0.4]])
OTHER = terms([0.8], [0, 1], [[0.3, 0.9]])
SIGNED = terms([1.0, -0.5], [1], [[1.0], [0.5]])
CONSTRAINED = attributes()["weighed and must"].terms  # one product, and the text must have "aba"


def test_a_value_is_the_sum_over_terms_of_products_of_weights() -> None:
    expected = [
        0.25 * 0.5 ** text.count(1) + 0.5 * 0.2 ** text.count(1) * 0.4 ** text.count(3)
        for text in TEXTS
    ]
    torch.testing.assert_close(values(TWO), torch.tensor(expected, dtype=torch.float64))


def test_weights_of_tokens_in_any_order() -> None:
    """Tokens that are not stored have weight 1; a token may be asked for twice."""
    tokens = torch.tensor([3, 0, 1, 3, 2])
    weights = [[1.0, 1.0, 0.5, 1.0, 1.0], [0.4, 1.0, 0.2, 0.4, 1.0]]
    expected = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(TWO.weights(tokens), expected)
    torch.testing.assert_close(TWO.weights(tokens.int()), expected)


@pytest.mark.parametrize(("left", "right"), [(TWO, OTHER), (CONSTRAINED, TWO), (TWO, CONSTRAINED)])
def test_products_complements_and_unions(left: Terms, right: Terms) -> None:
    p, q = values(left), values(right)
    torch.testing.assert_close(values(left.times(right)), p * q)
    torch.testing.assert_close(values(left.either(right)), p + q - p * q)
    torch.testing.assert_close(values(left.negated()), 1 - p)


def test_a_power_of_one_product() -> None:
    for some in (OTHER, CONSTRAINED):
        for exponent in (0.5, 3.0):
            power = some.power(exponent)
            torch.testing.assert_close(values(power), values(some) ** exponent)
            assert power.log_weights.dtype == torch.float64


def test_rewards_multiply_a_product() -> None:
    rewarded = OTHER.rewarded(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0.5, -1.0]))
    assert rewarded.tokens.tolist() == [0, 1, 2]
    expected = torch.tensor([[0.3, 0.9, 1.0]]).double().log() + torch.tensor([[0.0, 0.5, -1.0]])
    torch.testing.assert_close(rewarded.log_weights, expected)
    assert rewarded.coefficients.tolist() == [0.8]


def test_without_tokens_their_weight_is_1() -> None:
    fewer = TWO.without([3])
    assert fewer.tokens.tolist() == [1]
    spared = [[token for token in text if token != 3] for text in TEXTS]
    torch.testing.assert_close(values(fewer), values(TWO, spared))


def test_without_tokens_the_automaton_does_not_move() -> None:
    """Token 3 is "ab": without it, "aba" needs the tokens 0, 1 and 0."""
    fewer = CONSTRAINED.without([3])
    spared = [[token for token in text if token != 3] for text in TEXTS]
    torch.testing.assert_close(values(fewer), values(CONSTRAINED, spared))
    assert float(values(CONSTRAINED, [[3, 0]])) > 0
    assert float(values(fewer, [[3, 0]])) == 0


def test_an_automaton_is_restricted_to_a_vocabulary() -> None:
    few = CONSTRAINED.restricted(2)
    known = [text for text in TEXTS if set(text) <= {0, 1}]
    torch.testing.assert_close(values(few, known), values(CONSTRAINED, known))
    assert few.num_states == CONSTRAINED.num_states == 4
    assert few.automaton is not None
    assert set(few.automaton.dfa.tokens.tolist()) <= {0, 1}


def test_terms_with_equal_weights_are_added_and_those_that_cancel_dropped() -> None:
    double = terms([0.25, 0.25, 0.5, -0.5], [1, 2], [[0.5, 1.0]] * 2 + [[1.0, 0.3]] * 2)
    merged = double.times(Terms.one())
    assert merged.coefficients.tolist() == [0.5]
    assert merged.tokens.tolist() == [1]
    assert not len(terms([0.5, -0.5], [1], [[0.5], [0.5]]).times(Terms.one()))
    # A rest within the rounding error of large summands is no term; a larger one is.
    for rest, count in ((1e-14, 0), (1e-12, 1)):
        assert len(terms([1.0 + rest, -1.0], [1], [[0.5], [0.5]]).times(Terms.one())) == count


def test_weights_of_0_and_minus_0_are_equal() -> None:
    log_weights = torch.tensor([[0.0, -1.0], [-0.0, -1.0]], dtype=torch.float64)
    both = Terms(torch.full((2,), 0.25).double(), torch.tensor([1, 2]).int(), log_weights)
    assert len(both.times(Terms.one())) == 1


@pytest.mark.parametrize(
    ("some", "signed", "is_product"),
    [(TWO, False, False), (OTHER, False, True), (SIGNED, True, False), (Terms.one(), False, True)],
)
def test_kinds(some: Terms, signed: bool, is_product: bool) -> None:
    assert (some.signed, some.is_product) == (signed, is_product)
    assert some.num_states == 1


@pytest.mark.parametrize(
    ("tokens", "log_weights", "problem"),
    [
        ([2, 1], [[0.0, 0.0]], "ascending"),
        ([1, 1], [[0.0, 0.0]], "ascending"),
        ([-1, 1], [[0.0, 0.0]], "ascending"),
        ([1], [[0.0, 0.0]], "log-weight for every term and token"),
        ([1], [[torch.inf]], "finite"),
        ([1], [[torch.nan]], "finite"),
    ],
)
def test_invalid_terms_are_refused(
    tokens: list[int], log_weights: list[list[float]], problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        Terms(torch.ones(1).double(), torch.tensor(tokens), torch.tensor(log_weights))


@pytest.mark.parametrize("coefficient", [torch.inf, torch.nan])
def test_coefficients_are_finite(coefficient: float) -> None:
    with pytest.raises(InvalidInputError, match="finite"):
        terms([coefficient], [1], [[0.5]])


@pytest.mark.parametrize(
    ("some", "problem"),
    [
        (terms([0.5], [1], [[1.1]]), r"weights of a classifier must be in \[0, 1\]"),
        (terms([-0.5], [1], [[0.5]]), "none of them is positive"),
        (terms([2 * MAX_TOTAL, -2 * MAX_TOTAL], [1], [[0.5]] * 2), "too large"),
        (terms([1.1], [1], [[0.5]]), "values from 1.1 to 1.1"),
        (terms([0.5, -0.6], [1], [[0.5], [0.5]]), "do not form a probability"),
        # The empty text has 1 - 0.9, and token 1 has 0.1 - 0.9 * 0.5.
        (terms([1.0, -0.9], [1], [[0.1], [0.5]]), "values from -0.35 to -0.35"),
        # Token 1 has 0.99 - 0.9, and 64 times 0.53 - 0.9.
        (terms([1.0, -0.9], [1], [[0.99], [1.0]]), "do not form a probability"),
    ],
)
def test_terms_that_are_no_probability_are_refused(some: Terms, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        some.check_probability()


def test_terms_that_are_a_probability_pass() -> None:
    for some in (TWO, OTHER, SIGNED, Terms.one(), terms([1.0 + 1e-7], [1], [[1.0]])):
        some.check_probability()
    SIGNED.times(Terms.one())._add(SIGNED, -1.0).check_probability()  # without any term


def test_all_tokens_are_checked_also_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms_module, "VALUES_AT_ONCE", 2)
    wrong_last = terms([1.0, -0.9], [1, 2, 3], [[1.0, 1.0, 0.1], [1.0, 1.0, 0.5]])
    with pytest.raises(InvalidInputError, match=r"-0\.35"):
        wrong_last.check_probability()


def test_too_many_terms_are_refused_at_the_limit() -> None:
    def of(count: int) -> Terms:
        ones = torch.full((count,), 1 / count, dtype=torch.float64)
        weights = torch.linspace(0.1, 0.9, count, dtype=torch.float64)[:, None]
        return Terms(ones, torch.tensor([1], dtype=torch.int32), weights.log())

    assert len(of(MAX_TERMS // 2).times(terms([0.5, 0.5], [2], [[0.3], [0.4]]))) == MAX_TERMS
    with pytest.raises(InvalidInputError, match="up to 2,048 terms, but at most 1,024"):
        of(MAX_TERMS).times(TWO)
    most = (MAX_TERMS - 2) // 3  # and 2, and 2 for each: 1,022 terms
    of(most).either(TWO)
    with pytest.raises(InvalidInputError, match="up to 1,025 terms"):
        of(most + 1).either(TWO)


def test_a_signed_sum_is_accurate_where_terms_cancel() -> None:
    """1 - w for w near 1, and for w near 0; and sums are clamped to [0, 1]."""
    coefficients = torch.tensor([1.0, -1.0], dtype=torch.float64)
    near = torch.tensor([[0.0, -1e-20], [-800.0, -801.0], [0.0, 0.5], [1.0, -torch.inf]]).double()
    found = signed_sum(coefficients, near)
    torch.testing.assert_close(found[0], torch.tensor(1e-20).double(), rtol=1e-6, atol=0.0)
    assert found[1:].tolist() == [0.0, 0.0, 1.0]
    assert signed_sum(coefficients, torch.full((2,), -torch.inf).double()) == 0
    single = signed_sum(torch.ones(1).double(), torch.tensor([-700.0]).double())
    torch.testing.assert_close(single, torch.tensor(-700.0).double().exp(), rtol=1e-12, atol=0.0)
