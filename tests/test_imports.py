"""`import foretrace` and `foretrace --help` load nothing heavy: torch stays out."""

import subprocess
import sys

import pytest

import foretrace

FOREIGN = ("torch", "transformers", "numpy", "safetensors", "huggingface_hub", "sklearn", "vllm")


def loaded_modules(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_loads_nothing_heavy() -> None:
    assert not loaded_modules("import foretrace").intersection(FOREIGN)


def test_the_command_line_loads_nothing_heavy() -> None:
    assert not loaded_modules("import foretrace.cli").intersection(FOREIGN)


def test_every_public_name_is_there() -> None:
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    assert set(foretrace.__all__) <= set(dir(foretrace))
    for name in foretrace.__all__:
        assert getattr(foretrace, name) is not None


@pytest.mark.parametrize(
    "code",
    [
        "import foretrace as ft; ft.distill; import foretrace.distill.sampling.corpus as corpus",
        "import foretrace.distill.sampling.corpus as corpus; import foretrace as ft",
        "import foretrace as ft; from foretrace.distill.run import distill; "
        "corpus = ft.distill.sampling.corpus",
    ],
    ids=["attribute first", "module first", "function first"],
)
def test_distill_is_a_function_and_a_package(code: str) -> None:
    script = f"{code}; from foretrace.distill import DistillConfig; assert callable(ft.distill)"
    script += "; assert ft.distill.sampling.corpus is corpus; assert DistillConfig"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = foretrace.nonsense
