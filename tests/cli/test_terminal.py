"""Progress bars: the message after Ctrl-C."""

import pytest

from foretrace.cli.terminal import ProgressBars


@pytest.mark.parametrize(
    ("resumes", "expected"),
    [(True, "resumes where this one stopped"), (False, "starts over")],
)
def test_message_after_an_interrupt(
    resumes: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), ProgressBars(resumes=resumes, visible=False):
        raise KeyboardInterrupt
    assert f"Stopped. The same command {expected}." in capsys.readouterr().out


def test_no_message_without_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars(resumes=True, visible=False) as bars:
        bars.update("stage", 2, 2, "steps")
    assert "Stopped" not in capsys.readouterr().out
