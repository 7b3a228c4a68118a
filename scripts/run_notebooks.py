"""Run the English notebooks, store their outputs, and copy code and outputs to the Korean ones.

    python scripts/run_notebooks.py            # all notebooks
    python scripts/run_notebooks.py 01 03      # only these
    python scripts/run_notebooks.py --copy     # run nothing: only copy code cells to notebooks/ko

Use a machine that is otherwise idle, because the notebooks store timings. Edit code in notebooks/ only, text in both folders.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from pathlib import Path
from typing import Any, List

os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")  # without it jupyter_core 5 warns when it is imported

import nbformat as _nbformat
from nbclient import NotebookClient

nbformat: Any = _nbformat  # its functions are not annotated
FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def run(notebook: Any) -> None:
    """Execute a notebook in an empty folder. Its code cells receive the new outputs, and its metadata stays the same."""
    metadata = copy.deepcopy(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    notebook.metadata = metadata
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times
        if cell.cell_type == "code":
            cell.outputs = join_streams(cell.outputs)


def join_streams(outputs: List[Any]) -> List[Any]:
    """Return the outputs of a cell, with consecutive texts of one stream joined."""
    joined: List[Any] = []
    for output in copy.deepcopy(outputs):
        last = joined[-1] if joined else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def copy_code(english: Any, korean: Any) -> None:
    """Copy the code cells of a notebook, with their outputs, into its translation.

    Raises
    ------
    ValueError
        The two do not have the same sequence of code and text cells.
    """
    types = [[cell.cell_type for cell in notebook.cells] for notebook in (english, korean)]
    if types[0] != types[1]:
        raise ValueError(
            f"copy_code: got {len(types[1])} cells in the translation for {len(types[0])}; expected the same code and text"
            " cells in the same order. Add the new text to the Korean notebook first."
        )
    korean.cells = [
        theirs if theirs.cell_type == "code" else ours for ours, theirs in zip(korean.cells, copy.deepcopy(english.cells))
    ]
    korean.metadata = copy.deepcopy(english.metadata)


def main() -> None:
    """Read the arguments and update the notebooks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", help="numbers of notebooks, such as 01; all by default")
    parser.add_argument("--copy", action="store_true", help="copy code cells and outputs, run nothing")
    options = parser.parse_args()
    for path in sorted(FOLDER.glob("*.ipynb")):
        if options.numbers and path.name[:2] not in options.numbers:
            continue
        english = nbformat.read(path, as_version=4)
        korean = nbformat.read(FOLDER / "ko" / path.name, as_version=4)
        if not options.copy:
            run(english)
        copy_code(english, korean)
        nbformat.write(english, path)
        nbformat.write(korean, FOLDER / "ko" / path.name)
        print(f"{path.name}: {'copied' if options.copy else 'run and copied'} to notebooks/ko")


if __name__ == "__main__":
    main()
