"""The guides in docs/ are tried: their programs run, and their links lead somewhere."""

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import gluon_mgpu
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
REFERENCE = sorted(f"reference/{path.name}" for path in (ROOT / "docs" / "reference").glob("*.md"))

BLOCK = re.DOTALL | re.MULTILINE

WITHOUT_PROGRAMS = {"index.md", "architecture.md", "cli.md", "compatibility.md", "environment.md", "first_gpu_run.md"}
WITHOUT_PROGRAMS |= {"glossary.md", "installation.md", "limitations.md", "messages.md"}


def text(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


RUN = """
import gc, os, runpy, sys, time, traceback
import gluon_mgpu, matplotlib.pyplot
from mxnet import npx
gc.freeze()  # LeakCheck collects garbage often
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


def programs_of(page, *, of_gluoncv=False):
    found = re.findall(r"^```python\n(.*?)^```", text(page), BLOCK)
    return [program for program in found if ("gluoncv" in program) == of_gluoncv]


@pytest.mark.mxnet1("legacy arrays")
def test_programs_run(tmp_path):
    """In one process, because importing MXNet takes longer than most of them; each page with its own names and folder."""
    pages = [page for page in PAGES if page not in WITHOUT_PROGRAMS]
    assert all(programs_of(page) for page in pages)
    pages += [page for page in REFERENCE if programs_of(page)]
    for page in pages:
        (tmp_path / page).mkdir(parents=True)
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


@pytest.mark.parametrize("number", [0, 1], ids=["SSD", "FCN"])
def test_recipes_of_gluoncv_run(number, tmp_path):
    """In the environment of scripts/test_extras.sh gluoncv, and elsewhere if GluonCV is installed."""
    pytest.importorskip("gluoncv")
    detection, segmentation = programs_of("recipes.md", of_gluoncv=True)
    program = (detection, segmentation)[number] + ("\nassert totals[-1] < totals[0]", "\nassert history.rows")[number]
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, check=True, timeout=240)


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options(page):
    lines = re.findall(r"^(gluon-mgpu .*)$", text(page), re.MULTILINE)
    parts = [part for line in lines for part in line.split("gluon-mgpu ")[1:]]  # launch ... gluon-mgpu train ...
    for line in [f"gluon-mgpu {part.strip()}" for part in parts]:
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


def test_every_public_name_is_in_the_reference():
    """`sh scripts/docs.sh --build` also reads the docstrings, and fails at what it cannot read."""
    listed = set(re.findall(r"^\.\. (?:auto\w+|currentmodule):: (\S+)", "\n".join(map(text, REFERENCE)), re.MULTILINE))
    names = {name: getattr(gluon_mgpu, name) for name in gluon_mgpu.__all__}
    names = {f"gluon_mgpu.{name}" if inspect.ismodule(one) else name for name, one in names.items()}
    assert len(names) > 40 and not names - listed


def anchors_of(page):
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=BLOCK), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").rglob("*.md")]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(pages) > 40 and not broken


def test_every_public_name_has_an_example():
    """In its docstring, which doctest runs, or in a program of the reference."""
    programs = "\n".join(block for page in REFERENCE for block in re.findall(r"^```(?:python|text)\n.*?^```", text(page), BLOCK))
    names = [(name, getattr(gluon_mgpu, name)) for name in gluon_mgpu.__all__]
    for _, module in [one for one in names if inspect.ismodule(one[1])]:
        names += [(name, getattr(module, name)) for name in getattr(module, "__all__", ())]
    missing = {name for name, one in names if callable(one) and ">>>" not in (inspect.getdoc(one) or "")}
    assert not {name for name in missing if not re.search(rf"\b{name}\b", programs)}


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_long(page):
    assert len(text(page).split()) <= 2500


def test_the_index_lists_every_page():
    listed = re.findall(r"\]\(([^)#/]+\.md)\)", text("index.md"))
    assert sorted(set(listed)) == [page for page in PAGES if page != "index.md"]


KOREAN = sorted(path.name for path in (ROOT / "docs" / "ko").glob("*.md") if path.name != "terms.md")
TRANSLATED = [page for page in KOREAN if page not in ("index.md", "messages.md")]


@pytest.mark.parametrize("page", TRANSLATED)
def test_korean_pages_have_the_same_programs(page):
    """Except for comments; tables and diagrams in `text` blocks are translated."""
    blocks = [re.findall(r"^```(?:python|sh)\n.*?^```", text(name), BLOCK) for name in (page, f"ko/{page}")]
    blocks = [[re.sub(r" *# .*", "", block) for block in one] for one in blocks]
    assert blocks[0] == blocks[1] != []
    assert text(page).count("\n```") == text(f"ko/{page}").count("\n```")
    english, korean = (set(re.findall(r"--[a-z][a-z-]+", text(name))) for name in (page, f"ko/{page}"))
    assert korean <= english


def test_korean_words_are_found_by_their_parts():
    pytest.importorskip("sphinx")
    found = runpy.run_path(str(ROOT / "docs" / "conf.py"))["Substrings"]({}).split("체크포인트에서 재개하기 resume")
    assert {"재개", "체크포인트", "resume"} <= set(found) and "원" not in found


def test_korean_pages_use_the_listed_terms():
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.+?) \|$", text("ko/terms.md"), re.MULTILINE)
    avoided = {word: term for _, term, words in rows[1:] for word in words.split(", ")}
    assert len(avoided) > 10
    pages = [
        *(ROOT / "docs" / "ko" / page for page in KOREAN),
        ROOT / "README.ko.md",
        *(ROOT / "notebooks" / "ko").glob("*.ipynb"),
    ]
    for path in pages:
        found = {word for word in avoided if word in path.read_text(encoding="utf-8")}
        assert not found, f"{path.name}: {found}; see docs/ko/terms.md"
