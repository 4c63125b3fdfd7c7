"""The transform in logit space."""

import pytest
import torch

from foretrace.attribute import LogitAffine
from foretrace.errors import InvalidInputError


def test_it_is_the_formula() -> None:
    p = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    expected = torch.sigmoid(10 * torch.log(p / (1 - p)) - 30)
    torch.testing.assert_close(LogitAffine(10.0, -30.0)(p), expected)


def test_the_ends_stay_where_they_are() -> None:
    ends = torch.tensor([0.0, 1.0])
    assert LogitAffine(3.0, -3.0)(ends).tolist() == [0.0, 1.0]


def test_its_logarithm_does_not_underflow() -> None:
    p = torch.tensor([1e-30, 0.5], dtype=torch.float64)
    moved = LogitAffine(20.0, 0.0)
    assert moved.log(p)[0] == pytest.approx(20 * float(p[0].log()))
    torch.testing.assert_close(LogitAffine().log(p), p.log())


@pytest.mark.parametrize(("scale", "shift"), [(0.0, 0.0), (-1.0, 0.0), (1.0, float("inf"))])
def test_what_is_no_transform_is_refused(scale: float, shift: float) -> None:
    with pytest.raises(InvalidInputError, match="scale above 0"):
        LogitAffine(scale, shift)
