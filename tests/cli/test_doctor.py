"""`foretrace doctor`: the report and the exit code."""

import json
import re
import socket
import subprocess
import sys

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
    assert set(facts["extras"]) == {
        "transformers",
        "vllm",
        "llama-cpp",
        "mlx",
        "evaluate",
        "playground",
        "ray",
        "s3",
    }
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


def test_report_explains_the_dtype(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrace._hardware._bfloat16_flag", lambda: "amx_bf16")
    expected = "bfloat16 (this CPU has native bfloat16: amx_bf16)"
    assert json.loads(report(capsys, as_json=True))["dtypes"]["cpu"] == expected
    assert f"- `--dtype auto` on cpu: {expected}" in report(capsys, as_json=False)


def test_advice_on_few_cores() -> None:
    (advice,) = doctor.thread_advice(2, 0, {})
    assert "OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0" in advice
    assert doctor.thread_advice(64, 0, {}) == []


def test_advice_beside_other_torch_processes() -> None:
    (advice,) = doctor.thread_advice(16, 3, {})
    assert "3 other processes use torch" in advice
    assert "OMP_NUM_THREADS=4" in advice
    assert doctor.thread_advice(16, 3, {"OMP_NUM_THREADS": "4"}) == []
    (advice,) = doctor.thread_advice(16, 1, {})
    assert "1 other process uses torch" in advice


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_other_torch_processes_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = [sys.executable, "-c", "import torch; print(flush=True); input()"]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert re.search(r"- advice: \d+ other process.* torch", report(capsys, as_json=False))
        other.kill()


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(doctor, "CLUSTER_SECONDS", 4)
        assert "does not answer within 4 s" in doctor._cluster()
