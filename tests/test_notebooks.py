"""Contract: the notebooks run as they stand, in this very environment, without an error or a warning, and show pictures."""

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")  # without it jupyter_core 5 warns when it is imported

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def errors_of(notebook):
    """What went wrong, and what was said on stderr: by MXNet on GPUs, which says that it tries cuDNN's algorithms, harmlessly."""
    outputs = outputs_of(notebook)
    raised = [output.evalue for output in outputs if output.output_type == "error"]
    return raised, [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]


def has_picture(notebook):
    return any("image/png" in output.get("data", {}) for output in outputs_of(notebook))


def test_notebooks_are_found():
    assert len(NOTEBOOKS) >= 2


@every_notebook
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # what is asserted below must have come from this run
    notebook.cells.append(nbformat.v4.new_code_cell("import sys\nprint(sys.executable)"))
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells.pop().outputs[0].text.strip() == sys.executable
    raised, told = errors_of(notebook)
    assert raised == [] and not re.search("warning", "".join(told), re.IGNORECASE)
    assert has_picture(notebook)
    assert list(tmp_path.iterdir()) == []


@every_notebook
def test_committed_notebook_is_executed_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert errors_of(notebook) == ([], [])
    assert has_picture(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(not cell.metadata for cell in notebook.cells)  # no times of execution
    assert notebook.metadata.kernelspec.name == "python3"
    printed = "\n".join(output.get("text", "") for output in outputs_of(notebook))
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|opt|usr|Users)/\S+", printed) == []


@every_notebook
def test_sections_are_numbered_in_order(path):
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) == len(re.findall(r"^## ", text, re.MULTILINE)) > 0
    assert all(int(section) in numbers for section in re.findall(r"\bsections? (\d+)", text))
