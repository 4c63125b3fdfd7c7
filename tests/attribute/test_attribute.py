"""Test the algebra of attributes against enumeration."""

import functools
import itertools
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretrace.attribute import Attribute, parse
from foretrace.attribute.terms import Terms
from foretrace.attribute.token_ids import find_sorted
from foretrace.errors import InvalidInputError, TokenizerMismatchError

VOCAB, LENGTH = 4, 3
TEXTS = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))


def attributes(dtype: torch.dtype = torch.float64) -> tuple[list[Attribute], list[Tensor]]:
    """Return three attributes, and their probabilities of every text of three tokens."""
    weights = torch.tensor(
        [[0.5, 1.0, 0.25, 0.9], [1.0, 0.0, 0.75, 1.0], [1 - 1e-9, 0.3, 1.0, 1e-12]], dtype=dtype
    )
    named = zip(weights, "abc", strict=True)
    made = [Attribute.from_weights(row, name=name) for row, name in named]
    return made, [row.double()[TEXTS].prod(-1) for row in weights]


@functools.cache
def expressions(leaves: int) -> list[tuple[str, Attribute, Tensor]]:
    """Return every expression with that many leaves, negated at any set of nodes.

    Each comes as text, as the attribute, and as its probability of every text by enumeration.
    """
    if leaves == 1:
        plain = [*zip("abc", *attributes(), strict=True)]
    else:
        plain = []
        for left in range(1, leaves):
            pairs = itertools.product(expressions(left), expressions(leaves - left))
            for (text, one, p), (other, two, q) in pairs:
                plain.append((f"({text}&{other})", one & two, p * q))
                plain.append((f"({text}|{other})", one | two, p + q - p * q))
    return plain + [(f"~{text}", ~one, 1 - p) for text, one, p in plain]


@pytest.mark.parametrize("leaves", [1, 2, 3])
def test_every_expression_equals_enumeration(leaves: int) -> None:
    for text, attribute, probability in expressions(leaves):
        assert (attribute.probability(TEXTS) - probability).abs().max() < 1e-10, text


def test_the_negation_of_a_negation_is_the_attribute() -> None:
    (a, b, _), (p, *_) = attributes()
    for attribute in (a, ~a, a & b, ~(a | b), kind()):
        assert ~~attribute is attribute
    other = a.renamed("other")  # it has its own negation
    assert (~other).name == "~other"
    assert ~~other is other
    torch.testing.assert_close((~other).probability(TEXTS), 1 - p)
    torch.testing.assert_close((a & ~a).probability(TEXTS), p * (1 - p))  # independent


def test_equal_products_are_merged_whatever_the_order() -> None:
    (a, b, c), _ = attributes(torch.float32)
    assert len((a & b).terms) == 1
    assert len((a | a).terms) == 2  # 2a - a^2
    assert len((((a & b) & c) | (a & (b & c))).terms) == 2


def test_terms_that_cancel_are_dropped() -> None:
    one = Attribute.from_weights(torch.ones(VOCAB))
    (a, *_), _ = attributes()
    assert len((~one).terms) == 0
    assert (~one).probability(TEXTS).eq(0).all()
    assert len((a & ~one).terms) == 0
    assert len((a | one).terms) == 1
    assert (a | one).terms.tokens.numel() == 0


@pytest.mark.parametrize("cost", [1e-3, 1e-9, 1e-15, 50.0, 400.0])
def test_probabilities_near_0_and_1_are_accurate(cost: float) -> None:
    costs = torch.tensor([cost], dtype=torch.float64)
    one, token = torch.ones(1, dtype=torch.float64), torch.tensor([0], dtype=torch.int32)
    a = Attribute(Terms(one, token, -costs[None]))
    has, lacks = torch.exp(-costs), -torch.expm1(-costs)
    for attribute, expected in ((a, has), (~a, lacks), (a & ~a, has * lacks)):
        found = attribute.probability(torch.tensor([[0]]))
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("coefficient", [1e-9, 0.25, 1.0])
def test_the_coefficient_of_a_single_term_counts(coefficient: float) -> None:
    (a, b, _), (p, q, _) = attributes()
    scaled = Attribute(replace(a.terms, coefficients=a.terms.coefficients * coefficient))
    for attribute, expected in (
        (scaled, coefficient * p),
        (~scaled, 1 - coefficient * p),
        (scaled & b, coefficient * p * q),
        (scaled | b, coefficient * p + q - coefficient * p * q),
    ):
        torch.testing.assert_close(attribute.probability(TEXTS), expected, rtol=1e-12, atol=1e-15)
    assert (scaled & b).terms.coefficients.tolist() == [coefficient]
    assert scaled.top_tokens(1)[0].probability == pytest.approx(coefficient * 0.25)


weights_32 = st.lists(
    st.floats(0, 1, width=32) | st.sampled_from([0.0, 1.0, 1e-38, 1 - 2**-24]),
    min_size=VOCAB,
    max_size=VOCAB,
)


@given(st.lists(weights_32, min_size=3, max_size=3), st.integers(0, 10**6))
def test_probabilities_stay_in_0_and_1(weights: list[list[float]], choice: int) -> None:
    rows = zip("abc", torch.tensor(weights, dtype=torch.float32), strict=True)
    named = {name: Attribute.from_weights(row) for name, row in rows}
    every = expressions(3)
    text, *_ = every[choice % len(every)]
    found = parse(text).build(named).probability(TEXTS)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert ((found.to(dtype) >= 0) & (found.to(dtype) <= 1)).all()


@given(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), max_size=6))
def test_a_batch_equals_its_rows_and_padding_changes_nothing(texts: list[list[int]]) -> None:
    (a, b, _), _ = attributes()
    goal = a | ~b
    together = goal.probability(texts)
    alone = [goal.probability([text])[0] for text in texts]
    assert together.tolist() == [float(value) for value in alone]
    padded = torch.full((len(texts), 7), 2)
    mask = torch.zeros(len(texts), 7, dtype=torch.bool)
    for row, text in enumerate(texts):  # padding on the left, as in a batch of prompts
        padded[row, 7 - len(text) :] = torch.tensor(text, dtype=torch.long)
        mask[row, 7 - len(text) :] = True
    torch.testing.assert_close(goal.probability(padded, mask), together, rtol=0, atol=1e-15)


def test_top_tokens_change_the_probability_most() -> None:
    (a, *_), _ = attributes()
    assert [effect.token for effect in a.top_tokens(2)] == [2, 0]
    assert [effect.token for effect in (~a).top_tokens()] == [2, 0, 3]
    assert (~a).top_tokens(1)[0].probability == pytest.approx(0.75)
    assert Attribute.from_weights(torch.ones(3)).top_tokens() == []


def test_attributes_of_two_tokenizers_cannot_be_combined() -> None:
    weights = torch.tensor([0.5, 1.0])
    a = Attribute.from_weights(weights, tokenizer_fingerprint="sha256:a")
    b = Attribute.from_weights(weights, tokenizer_fingerprint="sha256:b")
    with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
        a & b
    with pytest.raises(InvalidInputError, match="one tokenizer"):
        a | Attribute.from_weights(torch.tensor([0.5, 1.0, 0.2]))
    assert (a | Attribute.from_weights(weights)).config.tokenizer_fingerprint == "sha256:a"


@pytest.mark.parametrize(
    "weights",
    [
        *(torch.tensor([1.5]), torch.tensor([-0.1]), torch.ones(2, 2), np.array([0.5j])),
        *([1.5], [float("nan")], [[0.5]], 0.5, "0.5", None, ["a"], [[0.5], [0.5, 0.5]]),
        torch.tensor([0.5]).to(torch.float8_e4m3fn),
    ],
)
def test_invalid_weights_are_refused(weights: Any) -> None:
    with pytest.raises(InvalidInputError, match="Weights must be"):
        Attribute.from_weights(weights)


def test_too_many_terms_are_refused_before_they_are_built() -> None:
    # Powers of one product: all 1,000 are distinct.
    powers = torch.arange(1, 1001, dtype=torch.float64)[:, None] * torch.tensor([[-0.1, -0.2]])
    many = Attribute(Terms(torch.ones(1000).double() / 1000, torch.tensor([0, 1]).int(), powers))
    with pytest.raises(InvalidInputError, match="1,000,000 terms"):
        many & many
    weights = torch.rand(11, 30, generator=torch.Generator().manual_seed(0))
    operands = map(Attribute.from_weights, weights[:10])
    ten = functools.reduce(lambda left, right: left | right, operands)
    assert len(ten.terms) == 1023
    with pytest.raises(InvalidInputError, match="2,047 terms"):
        ten | Attribute.from_weights(weights[10])


ONE = [1, 2, 2]
BATCH = [[0, 1, 2], [3, 3, 1]]
MASK = [[True, True, False], [False, True, True]]


SAME_TEXT: list[Any] = [
    *(ONE, tuple(ONE), range(1, 3), [np.int64(token) for token in ONE], list(torch.tensor(ONE))),
    *(torch.tensor(ONE, dtype=dtype) for dtype in (torch.int64, torch.int32)),
    *(np.array(ONE, dtype=dtype) for dtype in (np.int64, np.uint16)),
]
SAME_BATCH: list[Any] = [
    *(BATCH, tuple(BATCH), np.array(BATCH), torch.tensor(BATCH)),
    *([form(text) for text in BATCH] for form in (tuple, np.array, torch.tensor)),
    torch.tensor(BATCH).T.contiguous().T,
]
SAME_MASK: list[Any] = [MASK, np.array(MASK), np.array(MASK, dtype=int), torch.tensor(MASK).float()]


@pytest.mark.parametrize("text", SAME_TEXT)
def test_the_probability_of_one_text_is_a_number(text: Any) -> None:
    (a, *_), _ = attributes()
    found = a.probability(text)
    assert found.shape == ()
    assert found == a.probability([list(text)])[0]
    assert a.probability(ONE, [0, 1, 1]) == a.probability(ONE[1:])


@pytest.mark.parametrize("batch", SAME_BATCH)
@pytest.mark.parametrize("mask", [None, *SAME_MASK])
def test_a_batch_and_its_mask_may_be_lists_arrays_or_tensors(batch: Any, mask: Any) -> None:
    (a, b, _), _ = attributes()
    goal = a | ~b
    kept = BATCH if mask is None else [[0, 1], [3, 1]]
    assert goal.probability(batch, mask).tolist() == goal.probability(kept).tolist()


def test_a_batch_may_be_empty() -> None:
    (a, *_), _ = attributes()
    assert a.probability([]).shape == (0,)
    assert a.probability([[], []]).tolist() == [1.0, 1.0]
    assert a.probability(torch.zeros(2, 0, dtype=torch.long)).tolist() == [1.0, 1.0]
    assert a.probability(torch.zeros(0, dtype=torch.long)) == 1.0


@pytest.mark.parametrize(
    ("tokens", "mask", "problem"),
    [
        *((tokens, None, "token ids") for tokens in ("text", ["a"], 3, None, [1, [2]], [[1, [2]]])),
        (["a", "b"], MASK, "token ids"),
        *((tokens, None, "integers") for tokens in ([1.0], [[1.5]], [[True]], [[2**70]])),
        *((torch.tensor(tokens), None, "integers") for tokens in ([[1.0]], [[True]])),
        (np.array([[1.0]]), None, "integers"),
        *((torch.ones(shape).long(), None, "shape") for shape in ((), (1, 1, 1))),
        *((tokens, None, "shape") for tokens in ([[[1]]], [[1], 2])),
        *((BATCH, mask, "mask") for mask in (MASK[:1], MASK[0], "mask", [[1, 1], [1]])),
        (torch.tensor(BATCH), torch.tensor(MASK)[:, :2], "mask"),
        ([[1, 2], [3]], [[1, 1], [1, 0]], "same length"),
    ],
)
def test_other_inputs_are_refused(tokens: Any, mask: Any, problem: str) -> None:
    (a, *_), _ = attributes()
    with pytest.raises(InvalidInputError, match=problem):
        a.probability(tokens, mask)


@pytest.mark.parametrize(
    "weights",
    [
        *([0.9, 1.0, 0.0], (0.9, 1, 0), np.array([0.9, 1.0, 0.0])),
        np.array([0.9, 0.1, 1.0, 0.1, 0.0])[::2],
        torch.tensor([0.9, 1.0, 0.0], dtype=torch.float64, requires_grad=True),
    ],
)
def test_weights_may_be_a_list_an_array_or_a_tensor(weights: Any) -> None:
    attribute = Attribute.from_weights(weights)
    expected = pytest.approx([0.9, 1.0, 0.0], rel=1e-14)  # all digits are kept
    assert attribute.probability([[0], [1], [2]]).tolist() == expected
    assert attribute.config.vocab_size == 3


@pytest.mark.parametrize(
    "weights",
    [
        *([1, 0], np.array([True, False]), torch.tensor([1, 0])),
        *(np.array([1.0, 0.0], dtype=np.float32), torch.tensor([1.0, 0.0]).bfloat16()),
    ],
)
def test_weights_may_be_of_any_type(weights: Any) -> None:
    assert Attribute.from_weights(weights).probability([[0], [1]]).tolist() == [1.0, 0.0]


def test_weights_do_not_follow_the_array_they_came_from() -> None:
    weights = np.array([0.5, 1.0])
    attribute = Attribute.from_weights(weights)
    weights[:] = 0.1
    assert attribute.probability([[0], [1]]).tolist() == [0.5, 1.0]


def test_an_attribute_combines_only_with_attributes() -> None:
    (a, *_), _ = attributes()
    for other in (1.0, "b", None, a.terms):
        with pytest.raises(TypeError, match="unsupported operand"):
            a & other  # type: ignore[operator]
        with pytest.raises(TypeError, match="unsupported operand"):
            a | other  # type: ignore[operator]


def test_tokens_that_are_not_contiguous_raise_no_warning() -> None:
    (a, *_), _ = attributes()
    occurs = Attribute.contains("ab", [b"a", b"b", b"c", b"ab"])
    columns = torch.tensor(BATCH).T.contiguous().T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (a & occurs).probability(columns)
        find_sorted(torch.tensor([0, 2, 5])[::2], columns)
    assert find_sorted(torch.tensor([1, 3]), columns)[1].tolist() == [
        [False, True, False],
        [True, True, True],
    ]


def test_levels_belong_to_one_strength() -> None:
    """A constraint leaves the strength of an attribute as it is; other operations change it."""
    levels = {"mild": 2.0, "medium": 5.0}
    plain = Attribute.from_weights([0.5, 1.0])
    calibrated = replace(plain, config=replace(plain.config, levels=levels))
    contains = Attribute.contains("b", [b"a", b"b"])
    for kept in (~~calibrated, calibrated & contains, ~contains & calibrated):
        assert kept.config.levels == levels
    for changed in (~calibrated, calibrated & plain, calibrated | plain, calibrated**2):
        assert not changed.config.levels


def test_a_conjunction_remembers_its_factors() -> None:
    a, b = Attribute.from_rewards([0.5, 1.0]), Attribute.from_weights([0.5, 1.0])
    contains = Attribute.contains("b", [b"a", b"b"])
    assert (a & (b & ~contains)).factors == (a, b, ~contains)
    for alone in (a, ~a, b | contains, (a & b).renamed("both"), (a & b) ** 2):
        assert alone.factors == (alone,)


def test_goals_that_contradict_each_other_are_never_true() -> None:
    tokens = [b"st", b"orm", b"s", b"a", b" ", b"."]
    storm, storms = (Attribute.contains(text, tokens) for text in ("storm", "storms"))
    kind = Attribute.from_rewards([0.0, 1.0, 2.0, 0.0, 0.0, 0.0])
    for never in (storm & ~storm, kind & storms & ~storm, Attribute.contains("x", [b"a"])):
        assert never.is_never_true
        with pytest.raises(InvalidInputError, match="contradict each other"):
            never.require_satisfiable()
    for possible in (storm & ~storms, kind, ~(storm & ~storm)):
        assert not possible.is_never_true
        possible.require_satisfiable()


REWARDS = [0.0, 2.0, -1.0, 0.5]


def kind(once: bool = True) -> Attribute:
    return Attribute.from_rewards(REWARDS, bias=-0.25, first_only=once, name="kind")


def log_odds(attribute: Attribute, text: list[int]) -> float:
    return float(attribute.probability(text).logit())


def test_evidence_counts_a_token_once_or_every_time() -> None:
    text = [1, 2, 1, 0, 1]
    assert log_odds(kind(), text) == pytest.approx(-0.25 + 2 - 1)
    assert log_odds(kind(once=False), text) == pytest.approx(-0.25 + 3 * 2 - 1)
    assert float(kind().probability([[]])) == pytest.approx(1 / (1 + np.exp(0.25)))
    texts = [[1, 2, 1], [], [3, 3], [9]]  # a batch counts per text, and ignores unknown tokens
    expected = torch.tensor([0.75, -0.25, 0.25, -0.25], dtype=torch.float64).sigmoid()
    torch.testing.assert_close(kind().probability(texts), expected)


def test_the_negation_of_evidence_is_evidence() -> None:
    texts, unkind = [[1, 2], [3], []], ~kind()
    torch.testing.assert_close(unkind.probability(texts), 1 - kind().probability(texts))
    assert unkind.evidence[0].rewards.tolist() == [-2.0, 1.0, -0.5]


def test_a_conjunction_with_evidence_is_the_product_of_probabilities() -> None:
    product = Attribute.from_weights([1.0, 0.5, 0.9, 1.0], name="clean")
    texts = [[1, 2], [3], [], [1, 1]]
    for both in (product & kind(), kind() & product):
        expected = product.probability(texts) * kind().probability(texts)
        torch.testing.assert_close(both.probability(texts), expected)
    squared = kind() & kind()
    torch.testing.assert_close(squared.probability(texts), kind().probability(texts) ** 2)
    for conjunction in (both, squared):
        with pytest.raises(InvalidInputError, match="Negate single attributes"):
            _ = ~conjunction


def test_a_disjunction_with_evidence_is_refused() -> None:
    product = Attribute.from_weights([1.0, 0.5, 0.9, 1.0])
    for left, right in ((kind(), product), (product, kind()), (kind(), kind())):
        with pytest.raises(InvalidInputError, match="kind has rewards"):
            _ = left | right


def test_a_power_multiplies_log_odds_and_log_weights() -> None:
    texts = [[1, 2], [3], []]
    product = Attribute.from_weights([1.0, 0.5, 0.9, 1.0])
    torch.testing.assert_close((product**3).probability(texts), product.probability(texts) ** 3)
    expected = (2.5 * kind().probability(texts).logit()).sigmoid()
    torch.testing.assert_close((kind() ** 2.5).probability(texts), expected)
    both = (product & kind()) ** 2
    separate = (product**2).probability(texts) * (kind() ** 2).probability(texts)
    torch.testing.assert_close(both.probability(texts), separate)
    assert kind().has_power
    assert not (~product).has_power
    for exponent in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidInputError, match="strength"):
            _ = kind() ** exponent


def test_top_tokens_of_evidence_are_for_and_against() -> None:
    effects = kind().top_tokens()
    assert [effect.token for effect in effects] == [1, 2, 3]
    assert effects[0].probability == pytest.approx(float(kind().probability([1])))
    assert effects[1].probability < float(kind().probability([[]])) < effects[2].probability


@pytest.mark.parametrize("rewards", [[float("nan")], [float("inf")], [[1.0]], ["a"], [1j]])
def test_invalid_rewards_are_refused(rewards: Any) -> None:
    with pytest.raises(InvalidInputError, match="Rewards must be"):
        Attribute.from_rewards(rewards)
