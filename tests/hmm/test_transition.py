"""The dense transition in every dtype, and a structured transition."""

import pytest
import torch

from foretrace.errors import InvalidModelError
from foretrace.hmm import DenseTransition, Transition
from tiny import KroneckerTransition, simplex


def test_predict_and_expect_are_matrix_products() -> None:
    matrix = simplex(5, 5, seed=0)
    operator = DenseTransition(matrix)
    belief, values = simplex(2, 3, 5, seed=1), torch.rand(2, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(operator.predict(belief), belief @ matrix)
    torch.testing.assert_close(operator.expect(values), values @ matrix.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_with_a_rounded_matrix_stay_normalised(dtype: torch.dtype) -> None:
    operator = DenseTransition(simplex(300, 300, seed=0)).to(None, dtype)
    belief = simplex(4, 300, seed=1).float()
    precision = torch.finfo(dtype).eps
    for _ in range(50):
        belief = operator.predict(belief)
    # bfloat16 products round their results in both directions: row totals do not drift
    torch.testing.assert_close(belief.sum(-1), torch.ones(4), rtol=0, atol=precision + 1e-6)
    torch.testing.assert_close(
        operator.expect(torch.ones(300)), torch.ones(300), rtol=0, atol=precision
    )


def test_a_structured_transition_satisfies_the_protocol() -> None:
    structured = KroneckerTransition(simplex(2, 2, seed=0), simplex(3, 3, seed=1))
    assert isinstance(structured, Transition)
    dense = DenseTransition(torch.kron(structured.left, structured.right))
    belief = simplex(4, 6, seed=2)
    torch.testing.assert_close(structured.predict(belief), dense.predict(belief))
    torch.testing.assert_close(structured.expect(belief), dense.expect(belief))


def test_a_transition_must_be_square() -> None:
    with pytest.raises(InvalidModelError, match="square"):
        DenseTransition(simplex(2, 3, seed=0))
