"""Dense and sparse + background emissions do the same things to the same numbers."""

import pytest
import torch

from foretrace.errors import InvalidModelError
from foretrace.hmm import DenseEmission, Emission, SparseEmission
from foretrace.hmm.emission import csr
from foretrace.hmm.probability import transposed
from tiny import simplex, sparse_emission

STATES, VOCAB = 7, 40


def emission(form: str) -> Emission:
    if form == "dense":
        return DenseEmission(simplex(VOCAB, STATES, seed=3, dim=0))
    return sparse_emission(VOCAB, STATES, share=0.2, seed=3)


@pytest.fixture(params=["dense", "sparse"])
def operator(request: pytest.FixtureRequest) -> Emission:
    return emission(request.param)


def test_rows_are_distributions_over_tokens(operator: Emission) -> None:
    table = operator.rows(torch.arange(VOCAB))
    assert table.shape == (VOCAB, STATES)
    torch.testing.assert_close(table.sum(0), torch.ones(STATES, dtype=torch.float64))
    tokens = torch.tensor([[3, 3], [0, 39]])  # any shape, tokens repeated
    torch.testing.assert_close(operator.rows(tokens), table[tokens], rtol=0, atol=0)


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
def test_predict_is_a_product_with_the_table(operator: Emission, batch: tuple[int, ...]) -> None:
    belief = simplex(*batch, STATES, seed=1)
    expected = belief @ operator.rows(torch.arange(VOCAB)).T
    torch.testing.assert_close(operator.predict(belief), expected)


def test_blocks_are_parts_of_the_product(operator: Emission) -> None:
    beliefs = simplex(5, STATES, seed=1)
    expected = operator.predict(beliefs).T
    for size in (1, 7, 23, VOCAB, 2 * VOCAB):
        seen = 0
        for block, found in operator.predict_blocks(beliefs.T, size):
            assert block.start == seen
            torch.testing.assert_close(found, expected[block])
            seen = block.stop
        assert seen == VOCAB


def test_a_part_says_the_same_of_its_tokens(operator: Emission) -> None:
    beliefs, tokens = simplex(5, STATES, seed=1), torch.tensor([1, 4, 5, 38])
    expected = operator.predict(beliefs).T[tokens]
    part = operator.subset(tokens)
    torch.testing.assert_close(part.predict(beliefs.T), expected)
    for block in (slice(0, 4), slice(0, 1), slice(1, 3), slice(3, 4)):
        torch.testing.assert_close(part.rows(block).predict(beliefs.T), expected[block])
    assert part.nbytes > 0


def test_rows_of_a_subset_are_found_without_waiting_for_the_device() -> None:
    """The meta device holds no values: an operation that copies them to the host raises."""
    subset = sparse_emission(VOCAB, STATES, share=0.2, seed=3).subset(torch.tensor([1, 4, 5, 38]))
    matrix = subset.matrix
    indices = matrix.crow_indices().to("meta"), matrix.col_indices().to("meta")
    on_device = subset._replace(
        matrix=csr(*indices, matrix.values().to("meta"), (4, STATES)),
        background=subset.background.to("meta"),
        leak=subset.leak.to("meta"),
    )
    expected = subset.rows(slice(1, 3)).matrix
    found = on_device.rows(slice(1, 3)).matrix
    assert found.shape == expected.shape == (2, STATES)
    assert found.values().shape == expected.values().shape


def test_transposing_stays_on_the_device() -> None:
    table = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(transposed(table), table.T)
    assert transposed(table).is_contiguous()
    assert transposed(table.to("meta")).device.type == "meta"


def test_padded_entries_are_the_same() -> None:
    """What devices do that should not be waited for."""
    operator = sparse_emission(VOCAB, STATES, share=0.2, seed=3)
    tokens = torch.tensor([3, 3, 0, 39])
    rows = operator.background[tokens, None] * operator.leak
    operator._add_padded(rows, tokens)
    torch.testing.assert_close(rows, operator.rows(tokens))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_expect_sums_over_the_given_tokens(operator: Emission, batch: tuple[int, ...]) -> None:
    tokens = torch.tensor([0, 5, 39])
    values = torch.rand(*batch, 3, dtype=torch.float64)
    expected = values @ operator.rows(tokens)
    torch.testing.assert_close(operator.expect(values, tokens), expected)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_tables_still_sum_to_one(form: str, dtype: torch.dtype) -> None:
    """What rounding takes from a state's distribution, its normaliser gives back."""
    rounded = emission(form).to(None, dtype)
    assert rounded.dtype == dtype
    table = rounded.rows(torch.arange(VOCAB))
    assert table.dtype == torch.float32  # beliefs are never narrower
    torch.testing.assert_close(table.sum(0), torch.ones(STATES), rtol=0, atol=1e-6)
    exact = emission(form).rows(torch.arange(VOCAB)).float()
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(table, exact, rtol=2 * precision, atol=1e-6)
    belief = simplex(3, STATES, seed=5).float()
    torch.testing.assert_close(
        rounded.predict(belief), belief @ table.T, rtol=4 * precision, atol=1e-6
    )


def test_a_wide_belief_does_not_vanish_in_float16() -> None:
    states = 20_000
    table = DenseEmission(torch.full((4, states), 0.25, dtype=torch.float16))
    belief = torch.full((states,), 1 / states)
    belief[: states // 2] *= 1e-5  # far below the smallest float16
    predicted = table.predict(belief / belief.sum())
    torch.testing.assert_close(predicted, torch.full((4,), 0.25), rtol=1e-3, atol=0)


def test_tokens_must_not_vanish_in_float16() -> None:
    table = torch.full((60_000, 2), 1e-8)
    table[0] = 1 - 59_999e-8
    with pytest.raises(InvalidModelError, match=r"59999 tokens.*Use bfloat16"):
        DenseEmission(table).to(None, torch.float16)
    assert DenseEmission(table).to(None, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_tokens_expect_nothing(form: str, dtype: torch.dtype) -> None:
    none = (
        emission(form).to(None, dtype).expect(torch.ones(3, 0), torch.tensor([], dtype=torch.long))
    )
    assert torch.equal(none, torch.zeros(3, STATES))


def test_expecting_over_many_tokens_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, values = emission("dense"), torch.rand(2, VOCAB, dtype=torch.float64)
    whole = dense.expect(values, torch.arange(VOCAB))
    monkeypatch.setattr("foretrace.hmm.emission.CHUNK_ELEMENTS", 3 * STATES)
    torch.testing.assert_close(dense.expect(values, torch.arange(VOCAB)), whole)


def test_probabilities_come_row_by_row() -> None:
    predicted = emission("sparse").predict(simplex(4, STATES, seed=0))
    assert predicted.is_contiguous()


def test_a_state_may_say_nothing_but_background() -> None:
    background = torch.tensor([0.25, 0.75])
    silent = SparseEmission(
        offsets=torch.tensor([0, 1, 1]),
        states=torch.tensor([0]),
        values=torch.tensor([1.0]),
        background=background,
        leak=torch.tensor([0.0, 1.0]),
    )
    torch.testing.assert_close(silent.rows(torch.tensor([0, 1])).T[1], background)
    drawn = silent.sample(torch.ones(4000, dtype=torch.long), torch.Generator().manual_seed(0))
    assert abs(drawn.float().mean() - 0.75) < 0.03
    assert not silent.sample(torch.zeros(50, dtype=torch.long), None).any()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"values": torch.tensor([0.5, -0.1])}, "negative"),
        ({"values": torch.tensor([0.5, float("nan")])}, "NaN"),
        ({"states": torch.tensor([0, 2])}, "outside"),
        ({"states": torch.tensor([0, 0]), "offsets": torch.tensor([0, 2, 2])}, "each named once"),
        ({"offsets": torch.tensor([0, 1, 3])}, "must agree"),
        ({"background": torch.tensor([0.5, 0.1])}, "background does not sum to 1"),
        ({"leak": torch.tensor([0.5, 1.5])}, "leak"),
        ({"values": torch.tensor([0.5, 0.0])}, "does not sum to 1"),
    ],
)
def test_a_broken_sparse_table_is_refused(change: dict[str, torch.Tensor], complaint: str) -> None:
    sound = {
        "offsets": torch.tensor([0, 1, 2]),
        "states": torch.tensor([0, 1]),
        "values": torch.tensor([0.5, 0.5]),
        "background": torch.tensor([0.5, 0.5]),
        "leak": torch.tensor([0.5, 0.5]),
    }
    SparseEmission(**sound)
    with pytest.raises(InvalidModelError, match=complaint):
        SparseEmission(**(sound | change))


def test_one_state_alone_can_speak(operator: Emission) -> None:
    """All draws from one state: its own distribution, whatever the others are."""
    drawn = operator.sample(torch.full((20_000,), 2), torch.Generator().manual_seed(0))
    found = torch.bincount(drawn, minlength=VOCAB) / len(drawn)
    assert (found - operator.rows(torch.arange(VOCAB))[:, 2]).abs().max() < 0.02
