"""The notebooks in `examples/` run with a real LM, and are stored without outputs."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LM = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALLER = {"prompts * 8": "prompts * 1", "num_texts=400": "num_texts=48"}


@pytest.mark.parametrize("name", ["quickstart", "describe"])
def test_it_is_stored_without_outputs(name: str) -> None:
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter warns often
@pytest.mark.parametrize(
    ("name", "figures", "printed"),
    [("quickstart", 2, "strength 2.0"), ("describe", 0, "nats per token")],
)
def test_it_runs(
    name: str,
    figures: int,
    printed: str,
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `dev`")
    import nbformat

    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for needed in EXAMPLES.iterdir():  # a notebook may write files beside them
        (tmp_path / needed.name).symlink_to(needed)
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        for old, new in {LM: str(smollm2), **SMALLER}.items():
            cell.source = cell.source.replace(old, new)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=500, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == figures
    assert printed in "".join(output.get("text", "") for output in outputs)
