"""Offline mode where the Hugging Face hub cannot be reached."""

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from foretrace.cli.hub import skip_retries_if_unreachable


class SessionDouble:
    """Counts requests; fails if there is an error to raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.requests = error, 0

    def head(self, url: str, **_: Any) -> None:
        self.requests += 1
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn offline mode off, and restore it after the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def use(session: SessionDouble, monkeypatch: pytest.MonkeyPatch) -> SessionDouble:
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    return session


def test_an_unreachable_hub_switches_to_offline_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = use(SessionDouble(OSError("no route")), monkeypatch)
    skip_retries_if_unreachable("owner/model")
    assert "cannot be reached (no route)" in capsys.readouterr().err
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert constants.is_offline_mode()
    skip_retries_if_unreachable("owner/other")
    assert session.requests == 1


def test_a_reachable_hub_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(SessionDouble(), monkeypatch)
    skip_retries_if_unreachable("owner/model")
    assert session.requests == 1
    assert not constants.is_offline_mode()


def test_local_paths_send_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(SessionDouble(OSError()), monkeypatch)
    skip_retries_if_unreachable(str(tmp_path))
    skip_retries_if_unreachable(str(tmp_path / "missing"))
    assert session.requests == 0
