"""The notebook in `examples/` runs with a real LM, and is stored without outputs."""

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
LM = "HuggingFaceTB/SmolLM2-135M-Instruct"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_is_stored_without_outputs() -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code_cells())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter warns often
def test_it_runs_and_draws_two_figures(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `dev`")
    import nbformat

    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(LM, str(smollm2)).replace("copies=8", "copies=1")
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=500, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
