"""Contract: the notebooks run unchanged, without errors or warnings, and show plots; the Korean ones have the same code."""

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")  # without it jupyter_core 5 warns when it is imported

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
KOREAN = sorted((FOLDER / "ko").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
every_language = pytest.mark.parametrize("path", NOTEBOOKS + KOREAN, ids=lambda path: f"{path.parent.name}-{path.stem}")

# What is replaced in each notebook, by its number, so that the tests take seconds. All code still runs.
SMALL = {
    "01": {"repeats=3": "repeats=1", ", 2**24, 2**25]": "]", "256, 1024]": "256]", "range(1000)": "range(100)"},
    "02": {
        "num_images, num_test_images = 256, 180": "num_images, num_test_images = 8, 8",
        "epochs = 3": "epochs = 2",
        "num_steps = 6": "num_steps = 1",
        "epochs=2 * epochs": "epochs=epochs",
        "warm_up=6": "warm_up=1",
        "(6 + num_steps)": "(1 + num_steps)",
    },
    "03": {"num_pairs, num_test_pairs = 6000, 200": "num_pairs, num_test_pairs = 300, 10", "num_epochs = 8": "num_epochs = 2"},
    "04": {"epochs=3": "epochs=1"},
    "05": {"net, steps=5": "net, steps=2", "warm_up=6, steps=5": "warm_up=2, steps=1", "] * 12": "] * 3", "range(4)": "range(1)"},
}


# Without these cells, which start a dozen processes, unless --exhaustive: test_recovery.py kills a process, too.
LEFT_OUT = {"04_many_processes": ['runs["2 processes, one killed"]', "def steps_of(folder, rank, restart)"]}
LEFT_OUT["04_many_processes"] += ["SUMS = ", "figure = mgpu.plots.figure(9, 3.6)"]


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def errors_of(notebook):
    """Return the exceptions raised and the text on stderr. On GPUs, MXNet logs there that it tunes cuDNN: this is harmless."""
    outputs = outputs_of(notebook)
    raised = [output.evalue for output in outputs if output.output_type == "error"]
    return raised, [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]


def translation_of(path):
    """Return an English notebook and its Korean translation."""
    return nbformat.read(path, as_version=4), nbformat.read(FOLDER / "ko" / path.name, as_version=4)


def markdown_of(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def links_of(notebook):
    """Return the targets of all links and images in the text."""
    return re.findall(r"\]\(([^)\s]+)\)", "\n".join(markdown_of(notebook)))


def has_picture(notebook):
    return any("image/png" in output.get("data", {}) for output in outputs_of(notebook))


def parameters_of(notebook):
    """Return the cells whose values may be replaced."""
    return [cell for cell in notebook.cells if cell.metadata.get("tags") == ["parameters"]]


def make_small(notebook, replaced):
    """Replace parts of the code; an AssertionError says which is not there."""
    for old, new in replaced.items():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        assert cells, old
        for cell in cells:
            cell.source = cell.source.replace(old, new)


OWN = {"01": pytest.mark.mxnet1("legacy arrays"), "05": pytest.mark.mxnet1("Pipeline")}  # of MXNet 1.9


@pytest.mark.parametrize("path", [pytest.param(path, marks=OWN.get(path.stem[:2], ()), id=path.stem) for path in NOTEBOOKS])
def test_notebook_runs(path, tmp_path, request):
    notebook = nbformat.read(path, as_version=4)
    if not request.config.getoption("exhaustive"):
        make_small(notebook, SMALL[path.stem[:2]])
        for beginning in LEFT_OUT.get(path.stem, []):
            (left_out,) = (cell for cell in notebook.cells if cell.source.startswith(beginning))
            notebook.cells.remove(left_out)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # the assertions below must check the outputs of this run
    notebook.cells.append(nbformat.v4.new_code_cell("import sys\nprint(sys.executable)"))
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells.pop().outputs[0].text.strip() == sys.executable
    raised, stderr = errors_of(notebook)
    assert raised == [] and not re.search("warning", "".join(stderr), re.IGNORECASE)
    assert has_picture(notebook)
    assert list(tmp_path.iterdir()) == []


@every_language
def test_committed_notebook_is_executed_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert errors_of(notebook) == ([], [])
    assert has_picture(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(not cell.metadata or cell in parameters_of(notebook) for cell in notebook.cells)  # no execution times
    assert all(list(cell.metadata) == ["tags"] for cell in parameters_of(notebook))
    assert notebook.metadata.kernelspec.name == "python3"
    printed = "\n".join(output.get("text", "") for output in outputs_of(notebook))
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|opt|usr|Users)/\S+", printed) == []


@every_language
def test_sections_are_numbered_in_order(path):
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(markdown_of(notebook))
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) == len(re.findall(r"^## ", text, re.MULTILINE)) > 0
    assert all(
        int(section) in numbers
        for match in re.findall(r"\bsections? (\d+)|(?<!\d)(\d+)절", text)
        for section in filter(None, match)
    )


@every_language
def test_links_resolve(path):
    notebook = nbformat.read(path, as_version=4)
    files = [link for link in links_of(notebook) if not link.startswith("https://")]
    assert files != []
    assert [link for link in files if not (path.parent / link).is_file()] == []


def test_every_notebook_has_a_korean_translation():
    assert [path.name for path in KOREAN] == [path.name for path in NOTEBOOKS]


@every_notebook
def test_korean_notebook_has_the_same_cells_code_and_outputs(path):
    """Running the English notebook therefore tests both. After you change code, copy the code cells to notebooks/ko."""
    english, korean = translation_of(path)
    assert [(cell.id, cell.cell_type) for cell in korean.cells] == [(cell.id, cell.cell_type) for cell in english.cells]
    for ours, theirs in zip(korean.cells, english.cells):
        if theirs.cell_type == "code":
            assert ours == theirs, theirs.id  # source, outputs, execution count and metadata
    assert korean.metadata == english.metadata
    assert (korean.nbformat, korean.nbformat_minor) == (english.nbformat, english.nbformat_minor)


@every_notebook
def test_korean_text_is_translated_and_names_the_same_code(path):
    english, korean = (markdown_of(notebook) for notebook in translation_of(path))
    for text, translation in zip(english, korean):
        paragraphs = [part for part in translation.split("\n\n") if not part.startswith("English: [")]
        assert [part for part in paragraphs if not re.search("[가-힣]", part)] == []
        assert set(re.findall(r"`[^`\n]+`", translation)) == set(re.findall(r"`[^`\n]+`", text))
        assert len(re.findall("^#", translation, re.MULTILINE)) == len(re.findall("^#", text, re.MULTILINE))


@every_notebook
def test_languages_link_to_each_other_and_to_the_same_pages(path):
    english, korean = (links_of(notebook) for notebook in translation_of(path))
    assert (english[0], korean[0]) == (f"ko/{path.name}", f"../{path.name}")
    assert [link.replace("../../", "../") for link in korean[1:]] == english[1:]
