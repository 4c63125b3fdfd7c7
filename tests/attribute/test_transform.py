"""Test the affine transform in logit space."""

import math

import pytest
import torch

from foretrace.attribute import LogitAffine
from foretrace.attribute.transform import log_transformed
from foretrace.errors import InvalidInputError


def test_the_transform_follows_the_formula() -> None:
    p = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    expected = torch.sigmoid(10 * torch.log(p / (1 - p)) - 30)
    torch.testing.assert_close(LogitAffine(10.0, -30.0)(p), expected)


def test_0_and_1_do_not_change() -> None:
    ends = torch.tensor([0.0, 1.0])
    assert LogitAffine(3.0, -3.0)(ends).tolist() == [0.0, 1.0]


def test_the_identity_has_scale_1_and_shift_0() -> None:
    """A shift alone changes probabilities, and so does a scale alone."""
    p = torch.tensor([0.25, 0.5], dtype=torch.float64)
    for transform in (LogitAffine(), LogitAffine(1.0, 0.0)):
        assert transform.is_identity
        torch.testing.assert_close(transform(p), p)
    for transform in (LogitAffine(1.0, -2.0), LogitAffine(1.0, 1e-9), LogitAffine(2.0, 0.0)):
        assert not transform.is_identity
        assert not torch.equal(transform(p), p)


def test_logarithms_do_not_underflow() -> None:
    shares = torch.tensor([0.3, 1 - 1e-12, 0.5, 1.0], dtype=torch.float64)
    sizes = torch.tensor([-700.0, 0.0, -0.1, 0.0], dtype=torch.float64)
    moved = sum(log_transformed(shares.log(), sizes, 20.0, 1.0))
    assert isinstance(moved, torch.Tensor)
    assert moved[0] == pytest.approx(20 * (math.log(0.3) - 700) + 1)
    assert -1e-200 < moved[1] <= 0
    p = shares[2] * sizes[2].exp()
    assert moved[2] == pytest.approx(float(LogitAffine(20.0, 1.0)(p).log()))
    assert moved[3] == 0
    scale, shift = torch.full((4,), 20.0), torch.ones(4)
    differs, common = log_transformed(shares.log(), sizes, scale, shift)
    torch.testing.assert_close(differs + common, moved)
    assert differs.abs().max() < 100  # the large common part is separate


@pytest.mark.parametrize(("scale", "shift"), [(0.0, 0.0), (-1.0, 0.0), (1.0, float("inf"))])
def test_invalid_transforms_are_refused(scale: float, shift: float) -> None:
    with pytest.raises(InvalidInputError, match="scale above 0"):
        LogitAffine(scale, shift)
