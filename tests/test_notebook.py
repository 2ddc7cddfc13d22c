"""The notebook of examples/ is executed by a Jupyter kernel: plan, check, run, plot, compare and export."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_project

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebook.ipynb"
EXECUTE = """\
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read("notebook.ipynb", as_version=4)
nbformat.validate(notebook)
NotebookClient(notebook, timeout=3600, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_plans_runs_plots_compares_and_exports(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    folder = make_project(tmp_path / "project").parent
    shutil.copy(NOTEBOOK, folder)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-c", EXECUTE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads((folder / "executed.ipynb").read_text(encoding="utf-8"))["cells"]
    data = [output["data"] for cell in cells for output in cell.get("outputs", []) if "data" in output]
    pages = [_text(one["text/html"]) for one in data if "text/html" in one]
    frames = [page for page in pages if page.startswith("<iframe sandbox")]
    assert len(frames) == 2  # the run and the comparison
    assert "&lt;svg" in frames[0]
    assert any("image/png" in one for one in data)
    assert len(pages) - len(frames) == 4  # spec, plan, check, export
    assert (folder / "exported" / "model.safetensors").is_file()
    assert (folder / "report.html").is_file()


def _text(source: Any) -> str:
    return source if isinstance(source, str) else "".join(source)
