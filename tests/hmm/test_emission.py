"""Dense and sparse emissions compute the same results from the same probabilities."""

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
    table = operator.of_tokens(torch.arange(VOCAB))
    assert table.shape == (VOCAB, STATES)
    torch.testing.assert_close(table.sum(0), torch.ones(STATES, dtype=torch.float64))
    tokens = torch.tensor([[3, 3], [0, 39]])  # any shape, tokens repeated
    torch.testing.assert_close(operator.of_tokens(tokens), table[tokens], rtol=0, atol=0)


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
def test_predict_is_a_product_with_the_table(operator: Emission, batch: tuple[int, ...]) -> None:
    belief = simplex(*batch, STATES, seed=1)
    expected = belief @ operator.of_tokens(torch.arange(VOCAB)).T
    torch.testing.assert_close(operator.predict(belief), expected)


def test_predicting_in_blocks_equals_predicting_at_once(operator: Emission) -> None:
    beliefs = simplex(5, STATES, seed=1)
    expected = operator.predict(beliefs).T
    for size in (1, 7, 23, VOCAB, 2 * VOCAB):
        end = 0
        for block, probabilities in operator.predict_blocks(beliefs.T, size):
            assert block.start == end
            torch.testing.assert_close(probabilities, expected[block])
            end = block.stop
        assert end == VOCAB


def test_a_subset_predicts_the_same_probabilities(operator: Emission) -> None:
    beliefs, tokens = simplex(5, STATES, seed=1), torch.tensor([1, 4, 5, 38])
    expected = operator.predict(beliefs).T[tokens]
    subset = operator.subset(tokens)
    torch.testing.assert_close(subset.predict(beliefs.T), expected)
    for block in (slice(0, 4), slice(0, 1), slice(1, 3), slice(3, 4)):
        torch.testing.assert_close(subset.block(block).predict(beliefs.T), expected[block])
    assert subset.nbytes > 0


def test_slicing_a_subset_does_not_synchronise_with_the_device() -> None:
    """The meta device holds no values: an operation that copies them to the host raises."""
    subset = sparse_emission(VOCAB, STATES, share=0.2, seed=3).subset(torch.tensor([1, 4, 5, 38]))
    matrix = subset.matrix
    indices = matrix.crow_indices().to("meta"), matrix.col_indices().to("meta")
    on_device = subset._replace(
        matrix=csr(*indices, matrix.values().to("meta"), (4, STATES)),
        background=subset.background.to("meta"),
        leak=subset.leak.to("meta"),
    )
    expected = subset.block(slice(1, 3)).matrix
    sliced = on_device.block(slice(1, 3)).matrix
    assert sliced.shape == expected.shape == (2, STATES)
    assert sliced.values().shape == expected.values().shape


@pytest.mark.parametrize("by_product", [False, True])
def test_transposing_stays_on_the_device(by_product: bool) -> None:
    table = torch.arange(6.0).reshape(3, 2)
    result = transposed(table, by_product=by_product)
    assert torch.equal(result, table.T)
    assert result.is_contiguous()
    assert transposed(table.to("meta"), by_product=by_product).device.type == "meta"


def test_padded_entries_equal_the_rows() -> None:
    """Devices other than CPUs use the padded variant."""
    operator = sparse_emission(VOCAB, STATES, share=0.2, seed=3)
    tokens = torch.tensor([3, 3, 0, 39])
    rows = operator.background[tokens, None] * operator.leak
    operator._add_padded(rows, tokens)
    torch.testing.assert_close(rows, operator.of_tokens(tokens))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_expect_is_a_product_with_the_rows(operator: Emission, batch: tuple[int, ...]) -> None:
    tokens = torch.tensor([0, 5, 39])
    values = torch.rand(*batch, 3, dtype=torch.float64)
    expected = values @ operator.of_tokens(tokens)
    torch.testing.assert_close(operator.expect(values, tokens), expected)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_tables_still_sum_to_one(form: str, dtype: torch.dtype) -> None:
    """The normaliser corrects the rounding of a state's distribution."""
    rounded = emission(form).to(None, dtype)
    assert rounded.dtype == dtype
    table = rounded.of_tokens(torch.arange(VOCAB))
    assert table.dtype == torch.float32  # beliefs are never narrower
    torch.testing.assert_close(table.sum(0), torch.ones(STATES), rtol=0, atol=1e-6)
    exact = emission(form).of_tokens(torch.arange(VOCAB)).float()
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(table, exact, rtol=2 * precision, atol=1e-6)
    belief = simplex(3, STATES, seed=5).float()
    torch.testing.assert_close(
        rounded.predict(belief), belief @ table.T, rtol=4 * precision, atol=1e-6
    )


def test_a_flat_belief_does_not_underflow_in_float16() -> None:
    states = 20_000
    table = DenseEmission(torch.full((4, states), 0.25, dtype=torch.float16))
    belief = torch.full((states,), 1 / states)
    belief[: states // 2] *= 1e-5  # far below the smallest float16
    predicted = table.predict(belief / belief.sum())
    torch.testing.assert_close(predicted, torch.full((4,), 0.25), rtol=1e-3, atol=0)


def test_tokens_that_underflow_in_float16_are_refused() -> None:
    table = torch.full((60_000, 2), 1e-8)
    table[0] = 1 - 59_999e-8
    with pytest.raises(InvalidModelError, match=r"59999 tokens.*Use bfloat16"):
        DenseEmission(table).to(None, torch.float16)
    assert DenseEmission(table).to(None, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_expect_without_tokens_is_zero(form: str, dtype: torch.dtype) -> None:
    operator, no_tokens = emission(form).to(None, dtype), torch.tensor([], dtype=torch.long)
    assert torch.equal(operator.expect(torch.ones(3, 0), no_tokens), torch.zeros(3, STATES))


def test_expect_in_chunks_equals_expect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, values = emission("dense"), torch.rand(2, VOCAB, dtype=torch.float64)
    expected = dense.expect(values, torch.arange(VOCAB))
    monkeypatch.setattr("foretrace.hmm.emission.CHUNK_ELEMENTS", 3 * STATES)
    torch.testing.assert_close(dense.expect(values, torch.arange(VOCAB)), expected)


def test_sparse_predictions_are_contiguous() -> None:
    predicted = emission("sparse").predict(simplex(4, STATES, seed=0))
    assert predicted.is_contiguous()


def test_a_state_without_entries_emits_the_background() -> None:
    background = torch.tensor([0.25, 0.75])
    background_only = SparseEmission(
        offsets=torch.tensor([0, 1, 1]),
        states=torch.tensor([0]),
        values=torch.tensor([1.0]),
        background=background,
        leak=torch.tensor([0.0, 1.0]),
    )
    torch.testing.assert_close(background_only.of_tokens(torch.tensor([0, 1])).T[1], background)
    drawn = background_only.sample(
        torch.ones(4000, dtype=torch.long), torch.Generator().manual_seed(0)
    )
    assert abs(drawn.float().mean() - 0.75) < 0.03
    assert not background_only.sample(torch.zeros(50, dtype=torch.long), None).any()


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
def test_an_invalid_sparse_table_is_refused(
    change: dict[str, torch.Tensor], complaint: str
) -> None:
    valid = {
        "offsets": torch.tensor([0, 1, 2]),
        "states": torch.tensor([0, 1]),
        "values": torch.tensor([0.5, 0.5]),
        "background": torch.tensor([0.5, 0.5]),
        "leak": torch.tensor([0.5, 0.5]),
    }
    SparseEmission(**valid)
    with pytest.raises(InvalidModelError, match=complaint):
        SparseEmission(**(valid | change))


def test_sampling_from_a_single_state(operator: Emission) -> None:
    drawn = operator.sample(torch.full((20_000,), 2), torch.Generator().manual_seed(0))
    frequency = torch.bincount(drawn, minlength=VOCAB) / len(drawn)
    assert (frequency - operator.of_tokens(torch.arange(VOCAB))[:, 2]).abs().max() < 0.02
