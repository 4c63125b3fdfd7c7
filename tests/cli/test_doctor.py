"""`foretrace doctor`: a report that can be pasted, and says what is wrong."""

import json

import pytest

from foretrace.cli import doctor


def report(capsys: pytest.CaptureFixture[str], *, as_json: bool) -> str:
    doctor.doctor(as_json=as_json)
    return capsys.readouterr().out


def test_what_is_here_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(report(capsys, as_json=True))
    names = {part["name"]: part for part in found["packages"]}
    assert names["torch"]["fits"]
    assert names["torch"]["extra"] is None
    assert "pytest" not in names  # of those who develop it
    assert found["enumeration"] < 1e-12
    assert found["devices"][0].startswith("cpu: ")
    assert set(found["extras"]) == {"transformers", "vllm", "evaluate", "playground"}
    told = report(capsys, as_json=False)
    assert "| torch | " in told
    assert "exact" in told


def test_what_is_missing_is_said_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ["torch>=99", 'no-such-package>=1; extra == "vllm"', "numpy"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    with pytest.raises(SystemExit) as stopped:
        doctor.doctor(as_json=False)
    assert stopped.value.code == 1
    told = capsys.readouterr().out
    assert "(does not fit) | >=99" in told
    assert "lacks no-such-package: pip install 'foretrace[vllm]'" in told


def test_wrong_arithmetic_is_not_passed_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_enumerated", lambda: 0.1)
    with pytest.raises(SystemExit):
        doctor.doctor(as_json=False)
    assert "WRONG" in capsys.readouterr().out
