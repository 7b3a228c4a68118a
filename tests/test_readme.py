"""What the README says is tried: its programs, its commands, its files; and the Korean one says the same."""

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from gluon_mgpu.cli import main

ROOT = Path(__file__).parent.parent
OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": 240}
READMES = ["README.md", "README.ko.md"]


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_both_have_the_same_programs_and_commands():
    for language in ("python", "sh"):
        without_comments = [[re.sub(r" *#.*", "", block) for block in blocks(name, language)] for name in READMES]
        assert without_comments[0] == without_comments[1]
        assert without_comments[0]


def test_the_programs_run(tmp_path, monkeypatch, capfd):
    (tmp_path / "program.py").write_text("\n".join(blocks("README.md", "python")), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path("program.py", run_name="__main__")
    told = capfd.readouterr().out
    assert "epoch 3/3  train accuracy" in told
    accuracies = [float(line) for line in told.splitlines() if re.fullmatch(r"[01]\.\d+", line)]
    assert len(accuracies) == 1 and 0.9 < accuracies[0] <= 1.0


def test_commands_exist():
    """The list of commands names each that there is, and no other."""
    listed = re.findall(
        r"^\| `gluon-mgpu ([a-zA-Z0-9.: -]+)`", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    commands = {name: main.get_command(None, name) for name in main.list_commands(None)}
    groups = {name: command for name, command in commands.items() if hasattr(command, "list_commands")}
    there = [name for name in commands if name not in groups]
    there += [f"{name} {one}" for name, group in groups.items() for one in group.list_commands(None)]
    assert sorted(listed) == sorted(there)


@pytest.mark.mxnet1("legacy arrays")
def test_the_script_trains_before_and_after_its_change(tmp_path):
    """Both sides of the diff are complete programs; the Korean one has the same lines."""
    (diff,), (korean,) = (blocks(name, "diff") for name in READMES)
    assert re.sub(r" *# .*", "", diff) == re.sub(r" *# .*", "", korean)
    for number, dropped in enumerate("+-"):
        program = tmp_path / f"{number}.py"
        program.write_text(
            "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith(dropped)), encoding="utf-8"
        )
        first = "" if number else "import gluon_mgpu\n"  # gives MXNet the names that a newer NumPy lacks
        program.write_text(first + program.read_text(encoding="utf-8"), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # MXNet's dot hangs on two contexts with more
        done = subprocess.run([sys.executable, "-W", "ignore", str(program)], env=environment, **OUTPUT)
        printed = re.findall(r"^epoch (\d): loss (\d\.\d{3})$", done.stdout.decode(), re.MULTILINE)
        assert done.returncode == 0 and [epoch for epoch, _ in printed] == ["1", "2", "3"], done.stdout.decode()
        assert float(printed[0][1]) > 1 > 0.5 > float(printed[2][1])


def test_the_figures_are_those_of_the_results_and_the_picture_is_small():
    results = re.findall(r"[\d.]+", (ROOT / "scripts" / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"))
    figures = []
    for name in READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        first = text.split("\n## ")[0]
        (picture,) = re.findall(r"!\[.+\]\((.+)\)", first)
        assert (ROOT / picture).stat().st_size < 100_000 and "scripts/picture.py" in first
        figures.append(
            re.findall(r"\b\d+\.\d+\b", " ".join(re.findall(r"^\| .* \| (.*) \| (?:`python|the same|위와)", text, re.MULTILINE)))
        )
    assert figures[0] == figures[1] and len(figures[0]) == 9 and set(figures[0]) <= set(results)


@pytest.mark.parametrize("name", READMES)
def test_few_links_lead_on(name):
    links = re.findall(r"(?<!!)\[[^]]+\]\(([^)]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert len(links) <= 14 and set(links) & set(READMES)


def test_it_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1150


@pytest.mark.parametrize("name", [*READMES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_without_a_suitable_python_the_scripts_say_which(script, tmp_path):
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho 'PyPy 2.7'\nexit 1\n")
    fake.chmod(0o755)
    (tmp_path / "uname").write_text('#!/bin/sh\n[ "$1" = -s ] && echo Darwin || echo arm64\n')
    (tmp_path / "uname").chmod(0o755)
    environment = {**os.environ, "PYTHON": str(fake), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", str(ROOT / "scripts" / script)], env=environment, **OUTPUT)
    assert done.returncode != 0
    assert "found no suitable Python; expected CPython 3.8 to 3.14" in done.stdout.decode()
    assert "got Darwin arm64; tested on Linux x86_64" in done.stdout.decode()


def test_the_scripts_find_their_environment_ready(tmp_path):
    """A second call installs nothing: the environment that runs these tests was made by the script, or by hand."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("not run in the environment of scripts/test.sh")
    done = subprocess.run(["sh", str(ROOT / "scripts" / "test.sh"), "--version"], **OUTPUT)
    assert done.returncode == 0
    assert done.stdout.decode().startswith("pytest ")
