"""The dense transition is exact in every dtype; a structured one slots in."""

import pytest
import torch

from foretrace.errors import InvalidModelError
from foretrace.hmm import DenseTransition, Transition
from tiny import KroneckerTransition, simplex


def test_the_two_products() -> None:
    matrix = simplex(5, 5, seed=0)
    operator = DenseTransition(matrix)
    belief, values = simplex(2, 3, 5, seed=1), torch.rand(2, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(operator.predict(belief), belief @ matrix)
    torch.testing.assert_close(operator.expect(values), values @ matrix.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rounded_matrix_neither_gains_nor_loses_mass(dtype: torch.dtype) -> None:
    operator = DenseTransition(simplex(300, 300, seed=0)).to(None, dtype)
    belief = simplex(4, 300, seed=1).float()
    precision = torch.finfo(dtype).eps
    for _ in range(50):
        belief = operator.predict(belief)
    # a product in bfloat16 rounds its result, to either side: no drift of a whole row's error
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
