"""The guides in docs/ are tried: their programs run, and their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))

WITHOUT_PROGRAMS = {"architecture.md", "cli.md", "compatibility.md", "index.md", "launcher.md", "limitations.md", "names.md"}


def text(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_there_are_pages():
    assert len(PAGES) >= 3


RUN = """
import os, runpy, sys, time, traceback
from mxnet import npx
failed = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    print("#", folder, flush=True)
    began = time.process_time()
    try:
        runpy.run_path("page.py", run_name="__main__")
    except BaseException:
        traceback.print_exc()
        failed.append(os.path.basename(folder))
    npx.reset_np()
    print(f"# took {time.process_time() - began:.1f} s of the processor", flush=True)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def programs_of(page):
    return re.findall(r"^```python\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def test_programs_run(tmp_path):
    """In one process, because importing MXNet takes longer than most of them; each page with its own names and folder."""
    pages = [page for page in PAGES if page not in WITHOUT_PROGRAMS]
    for page in pages:
        assert programs_of(page), page
        (tmp_path / page).mkdir()
        (tmp_path / page / "page.py").write_text("\n".join(programs_of(page)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, *(str(tmp_path / page) for page in pages)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout.decode()
    print(done.stdout.decode())


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options(page):
    lines = re.findall(r"^(gluon-mgpu .*)$", text(page), re.MULTILINE)
    for line in [
        f"gluon-mgpu {part.strip()}" for found in lines for part in found.split("gluon-mgpu ")[1:]
    ]:  # launch ... train ...
        words = line.split(" #")[0].split()[1:]
        named = [word for word in words if word.startswith("--")]
        path = []
        for word in words:
            if word.startswith("-") or CliRunner().invoke(main, [*path, word, "--help"]).exit_code:
                break
            path.append(word)
        told = CliRunner().invoke(main, [*path, "--help"])
        assert path and told.exit_code == 0, line
        assert all(option.split("=")[0] in told.output for option in named), (line, told.output)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)", text(page)):
        assert (ROOT / "docs" / link).exists(), link


def anchors(path):
    """The anchors that GitHub gives a page's headings: lower case, without punctuation, hyphens for spaces."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_anchors_are_headings(page):
    for name, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", text(page)):
        path = ROOT / "docs" / (name or page)
        assert anchor in anchors(path), f"{name}#{anchor}"


def test_the_index_lists_every_page():
    listed = re.findall(r"\]\(([^)#/]+\.md)\)", text("index.md"))
    assert sorted(listed) == [page for page in PAGES if page != "index.md"]
