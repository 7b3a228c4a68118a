"""What a newcomer reads first: help(gluon_mgpu), the public names, and the page of names that look alike."""

import json
import pydoc
import re
from pathlib import Path

import gluon_mgpu as mgpu
import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")


def test_help_begins_with_the_public_names():
    """It began with a list of internal modules."""
    shown = pydoc.plain(pydoc.render_doc(mgpu))
    first = shown[: shown.index("PACKAGE CONTENTS")]
    assert first.index("use_devices") < first.index("fit") < first.index("Pipeline")
    table = mgpu.__doc__.split("\n\n")[2]
    named = set(re.findall(r"\w+", re.sub(r"^.{19}", "", table, flags=re.MULTILINE))) - {"callbacks", "the", "room"}
    assert named <= set(mgpu.__all__)
    assert {"fit", "Trainer", "use_devices", "split_batch", "Checkpoint", "EarlyStopping", "FitState", "plots"} <= named


def test_all_lists_each_name_once():
    assert len(set(mgpu.__all__)) == len(mgpu.__all__)
    assert all(hasattr(mgpu, name) for name in mgpu.__all__)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_use_public_names(path):
    """They used plots and devices, which were internal."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert set(re.findall(r"(?<![\w.])mgpu\.(\w+)", code)) <= set(mgpu.__all__)


def test_the_page_names_what_there_is():
    functions = re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE)
    assert len(functions) == 7 and set(functions) <= set(mgpu.__all__)
