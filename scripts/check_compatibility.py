"""Install this project with every supported Python, with the oldest and the newest NumPy, and test it there.

python scripts/check_compatibility.py

Every combination gets a clean environment: virtual environment, `pip install`, `pip check`, `gluon-mgpu doctor`, one epoch of
`gluon-mgpu train resnet18`, the contract tests. Then pip resolves each extra in another clean environment of each Python. Each
Python's own pip asks the registry for the available versions. A failure is reported, and the next combination is tried. The
program prints a Markdown table, and exits with 0 if all passed, with 1 otherwise.
"""

from __future__ import annotations

import configparser
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Iterable, List, Sequence, Tuple

import click
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
# The quick contracts: devices agree, hand-written loops are matched, no step waits, invalid arguments raise, files can be read.
CONTRACT = tuple(
    f"tests/test_{name}.py" for name in ("transparency", "parity", "no_sync", "bad_input", "sharding", "params_file", "precision")
)
_MXNET = "mxnet==1.9.1"  # the extra cpu also asks for an old NumPy, for programs that import mxnet first
_TESTERS = ("pytest", "pytest-timeout", "hypothesis", "greenlet")  # packages of the extra dev that the contract tests use
_NOT_BY_PIP = ("horovod",)  # scripts/build_horovod.sh builds it
_NOT_COPIED = (".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
# Variables that are set for other programs would not be a clean environment.
_NOT_PASSED_ON = ("PYTHON", "PYTEST", "MXNET_", "GLUON_MGPU_", "OMP_", "MALLOC_", "DMLC_", "VIRTUAL_ENV")


class CheckError(RuntimeError):
    """A step of a combination failed; `step` is its name, the message the reason."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(why)
        self.step = step


@dataclass(frozen=True)
class Ran:
    """A command that has ended: its exit code, and its output on both streams."""

    code: int
    output: str


@dataclass(frozen=True)
class Project:
    """A project's setup.cfg: its Pythons, the allowed versions of NumPy, its extras, and what its contract tests need."""

    pythons: Tuple[str, ...]
    numpy: SpecifierSet
    extras: Tuple[str, ...]
    testers: Tuple[str, ...]


Run = Callable[..., Ran]


def run(command: Sequence[object], *, cwd: Path, timeout_s: float) -> Ran:
    """Return what a command printed and its exit code; after `timeout_s` seconds it is killed, and the code is 124."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, code = process.communicate(timeout=timeout_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        output, code = process.communicate()[0] + f"\nIt took longer than {timeout_s:g} s.".encode(), 124
    except BaseException:
        _kill(process)
        raise
    return Ran(code, output.decode(errors="replace"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_project(root: Path) -> Project:
    """Read a project's setup.cfg."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    options, extras = config["options"], config["options.extras_require"]
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", config["metadata"].get("classifiers", ""))
    allowed = SpecifierSet(options["python_requires"])
    return Project(
        tuple(python for python in pythons if allowed.contains(f"{python}.0")),
        next(one.specifier for one in _requirements(options["install_requires"]) if one.name == "numpy"),
        tuple(name for name in extras if name not in _NOT_BY_PIP),
        tuple(str(one) for one in _requirements(extras["dev"]) if one.name in _TESTERS),
    )


def _requirements(text: str) -> List[Requirement]:
    lines = (line.strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def find_interpreter(python: str, *, run: Run = run) -> Path:
    """Return the program of a Python such as `3.8`: on the PATH, else the newest one of pyenv. A path is returned as it is.

    A program on the PATH that does not run, such as a version manager's placeholder, is skipped.
    """
    if os.sep in python:
        return Path(python)
    folder = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    versions = sorted(folder.glob(f"{python}.*/bin/python"), key=lambda path: Version(path.parent.parent.name), reverse=True)
    on_path = shutil.which(f"python{python}")
    for path in [*([Path(on_path)] if on_path else []), *versions]:
        if run([path, "-c", "0"], cwd=Path.cwd(), timeout_s=60).code == 0:
            return path
    raise CheckError("interpreter", f"There is no python{python} on the path or in pyenv's folder.")


def available(name: str, python: Path, *, run: Run = run) -> List[Version]:
    """Return the versions of a package that have a wheel for a Python, as its pip finds them.

    pip gets a request for a version that does not exist, and lists the others; `pip index` also lists those without a wheel.
    """
    with tempfile.TemporaryDirectory() as nothing:
        command = [python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", nothing, f"{name}==0"]
        output = run(command, cwd=Path(nothing), timeout_s=120).output
    found = re.search(r"from versions: (.+)\)", output)
    if not found or found.group(1) == "none":
        raise CheckError("versions", f"The registry has no wheel of {name} for {python}: {_last_lines(output)}")
    return [Version(version) for version in found.group(1).split(", ")]


def choose(versions: Iterable[Version], allowed: SpecifierSet, which: str) -> str:
    """Return the `oldest` or `newest` allowed release.

    Examples
    --------
    >>> choose([Version("1.9"), Version("1.21"), Version("2.0")], SpecifierSet(">=1,<2"), "newest")
    '1.21'
    """
    fit = sorted(version for version in allowed.filter(versions) if not version.is_prerelease)
    if not fit:
        raise CheckError("versions", f"No release fits {allowed}.")
    return str(fit[0 if which == "oldest" else -1])


class Check:
    """The steps of one combination, in a new environment, which is removed at the end. What they print goes into a log.

    Parameters
    ----------
    folder : Path
        For the environment and the results of training.
    source : Path
        A copy of the project, in which pip builds and pytest runs.
    log : Path
    run : callable
        As `run`.
    timeout_s : float, seconds
        For each step.
    """

    def __init__(self, folder: Path, source: Path, log: Path, *, run: Run = run, timeout_s: float = 600) -> None:
        self._environment, self._output, self._source, self._log = folder / "environment", folder / "run", source, log
        self._run, self._timeout_s = run, timeout_s

    def step(self, kind: str, *command: object) -> str:
        """Return what a command printed; raise `CheckError` if it failed."""
        ran = self._run(command, cwd=self._source, timeout_s=self._timeout_s)
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(map(str, command))}\n{ran.output}\nexit code {ran.code}\n\n")
        if ran.code:
            raise CheckError(kind, _last_lines(ran.output))
        return ran.output

    def start(self, python: str) -> Path:
        """Make the environment, and return its Python."""
        self.step("environment", find_interpreter(python, run=self._run), "-m", "venv", "--clear", self._environment)
        return self._environment / "bin" / "python"

    def tests(self, python: str, which: str, project: Project) -> Tuple[str, str]:
        """Install and test the project with a NumPy; return NumPy's version, and pytest's count."""
        program = self.start(python)
        numpy = which
        if which in ("oldest", "newest"):
            numpy = choose(available("numpy", program, run=self._run), project.numpy, which)
        install = [program, "-m", "pip", "install", "--only-binary", ":all:"]
        self.step("install", *install, f"{self._source}[train]", _MXNET, f"numpy=={numpy}", *project.testers)
        self.step("install", program, "-m", "pip", "check")
        command = program.parent / "gluon-mgpu"
        self.step("commands", command, "doctor", "--devices", "cpu*2")
        self.step("commands", command, "train", "resnet18", "--devices", "cpu*2", "--epochs", "1", "--output", self._output)
        # Appended to the path, the copy does not hide the installed package.
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=append"]
        output = self.step("tests", program, "-m", "pytest", *options, *CONTRACT)
        counts = re.findall(r"(\d+ (?:passed|skipped|deselected|xfailed).*?)(?: in [\d.]+s.*)?$", output, re.MULTILINE)
        return numpy, counts[-1] if counts else "no tests"

    def extras(self, python: str, project: Project) -> Tuple[str, str]:
        """Resolve each extra by itself; return "-", and their names."""
        program = self.start(python)
        self.step("install", program, "-m", "pip", "install", "--upgrade", "pip")
        for extra in project.extras:
            self.step(f"extra {extra}", program, "-m", "pip", "install", "--dry-run", f"{self._source}[{extra}]")
        return "-", f"extras {', '.join(project.extras)}"

    def close(self) -> None:
        """Remove what it made, except for the log."""
        for used in (self._environment, self._output):
            shutil.rmtree(used, ignore_errors=True)


def check(one: Check, python: str, which: str, project: Project) -> Tuple[str, str, str]:
    """Return a row of the table: Python, NumPy, result. `which` is `oldest`, `newest`, a version, or `extras`."""
    try:
        numpy, result = one.extras(python, project) if which == "extras" else one.tests(python, which, project)
        return python, f"{numpy} ({which})" if which in ("oldest", "newest") else numpy, result
    except (CheckError, OSError) as error:
        return python, which, f"failed: {getattr(error, 'step', 'environment')}: {error}"
    finally:
        one.close()


def _last_lines(output: str, num_lines: int = 4) -> str:
    """Return the lines that report an error (of pytest, pip or an exception) if there are any, else the last lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(FAILED|ERROR|Error)\b|[\w.]+(Error|Exception): ", line)]
    return " / ".join((telling or lines)[-num_lines:]) or "It printed nothing."


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--python", "pythons", multiple=True, metavar="X.Y|PATH", help="By default all that setup.cfg names.")
@click.option(
    "--only",
    "choices",
    multiple=True,
    default=("oldest", "newest", "extras"),
    show_default=True,
    metavar="oldest|newest|VERSION|extras",
    help="NumPy: of those with a wheel for the Python that setup.cfg allows. extras: pip resolves each extra.",
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=600, show_default=True, help="Seconds for each step.")
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/compatibility"),
    show_default=True,
    help="Folder for what each step printed.",
)
def main(pythons: Sequence[str], choices: Sequence[str], timeout_s: float, logs: Path) -> None:
    """Install this project with every Python and the oldest and newest NumPy that it allows, and try it there.

    Needs those Pythons, on the path or in pyenv's folder, and a network. Progress goes to standard error.
    """
    project = read_project(ROOT)
    logs.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
        source = Path(folder) / "project"  # building leaves files, and the project may change meanwhile
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        for python in pythons or project.pythons:
            for which in choices:
                log = logs / f"python-{python.replace(os.sep, '-')}-{which}.log"
                log.write_text("", encoding="utf-8")
                rows.append(check(Check(Path(folder), source, log, timeout_s=timeout_s), python, which, project))
                click.echo(" | ".join(rows[-1]), err=True)
    system = f"{platform.system()} {platform.machine()}, {datetime.now(timezone.utc):%Y-%m-%d}"
    click.echo(f"{_MXNET}, {system}:\n\n| Python | NumPy | result |\n|---|---|---|")
    for row in rows:
        click.echo(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    sys.exit(1 if any(result.startswith("failed") for *_, result in rows) else 0)


if __name__ == "__main__":
    main()
