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


def test_logarithms_do_not_underflow() -> None:
    log_p = torch.tensor([-700.0, -1e-12, -0.5])
    moved = LogitAffine(20.0, 1.0).of_log(log_p.double())
    assert moved[0] == pytest.approx(20 * -700.0 + 1)
    assert -1e-200 < moved[1] <= 0
    p = log_p.double().exp()[2]
    assert moved[2] == pytest.approx(float(LogitAffine(20.0, 1.0)(p).log()))
    assert torch.equal(LogitAffine().of_log(log_p), log_p)
    ends = LogitAffine(2.0, 1.0).of_log(torch.tensor([-torch.inf, 0.0]))
    assert ends.tolist() == [-torch.inf, 0.0]


@pytest.mark.parametrize(("scale", "shift"), [(0.0, 0.0), (-1.0, 0.0), (1.0, float("inf"))])
def test_what_is_no_transform_is_refused(scale: float, shift: float) -> None:
    with pytest.raises(InvalidInputError, match="scale above 0"):
        LogitAffine(scale, shift)
