"""`foretrace doctor`: the report and the exit code."""

import json

import pytest

from foretrace.cli import doctor


def report(capsys: pytest.CaptureFixture[str], *, as_json: bool) -> str:
    doctor.doctor(as_json=as_json)
    return capsys.readouterr().out


def test_report_lists_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(report(capsys, as_json=True))
    packages = {package["name"]: package for package in facts["packages"]}
    assert packages["torch"]["fits"]
    assert packages["torch"]["extra"] is None
    assert "pytest" not in packages  # an extra for developers
    assert facts["enumeration"] < 1e-12
    assert facts["devices"][0].startswith("cpu: ")
    assert set(facts["extras"]) == {"transformers", "vllm", "evaluate", "playground"}
    text = report(capsys, as_json=False)
    assert "| torch | " in text
    assert "exact" in text


def test_missing_packages_are_reported_with_a_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements = ["torch>=99", 'no-such-package>=1; extra == "vllm"', "numpy"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requirements)
    with pytest.raises(SystemExit) as stopped:
        doctor.doctor(as_json=False)
    assert stopped.value.code == 1
    text = capsys.readouterr().out
    assert "(does not fit) | >=99" in text
    assert "lacks no-such-package: pip install 'foretrace[vllm]'" in text


def test_wrong_eap_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_eap_error", lambda: 0.1)
    with pytest.raises(SystemExit):
        doctor.doctor(as_json=False)
    assert "WRONG" in capsys.readouterr().out
