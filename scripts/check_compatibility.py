"""Install this project with every supported Python, with the oldest and the newest NumPy, and test it there.

python scripts/check_compatibility.py

Every combination gets a clean environment: virtual environment, `pip install`, `pip check`, `gluon-mgpu doctor`, one epoch of
`gluon-mgpu train resnet18`, tests. Each Python's own pip asks the registry for the available versions. After a failure, the
script reports it and tries the next combination. It exits with 0 if all passed, with 1 otherwise.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import click
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
# The quick contracts: devices agree, hand-written loops are matched, no step waits, invalid arguments raise, files can be read.
CONTRACT = tuple(
    f"tests/test_{name}.py" for name in ("transparency", "parity", "no_sync", "bad_input", "sharding", "params_file", "precision")
)
_TESTS = {"contract": CONTRACT, "all": ("tests", "--pyargs", "gluon_mgpu")}
_TESTERS = ("pytest", "pytest-timeout", "hypothesis", "greenlet")  # packages of the extra dev that the contract tests use
_NOT_COPIED = (".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
# Variables that are set for other programs would not be a clean environment.
_NOT_PASSED_ON = ("PYTHON", "PYTEST", "MXNET_", "GLUON_MGPU_", "OMP_", "MALLOC_", "DMLC_", "VIRTUAL_ENV")
_LISTED = ("numpy", "mxnet", "click", "rich", "scipy", "scikit-learn", "matplotlib", "pytest")


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
    """A project's setup.cfg: its Pythons, its requirements, and those of its extra `dev`."""

    version: str
    pythons: Tuple[str, ...]
    needs: Tuple[Requirement, ...]
    dev: Tuple[Requirement, ...]


@dataclass(frozen=True)
class Interpreter:
    """A Python such as `3.8`, and its program; None if it was not found."""

    python: str
    path: Optional[Path]


@dataclass(frozen=True)
class Result:
    """The result of one combination.

    Attributes
    ----------
    python : str
        The full version, or as much of it as is known.
    choice : str
        `oldest`, `newest`, or the requested version of NumPy.
    packages : dict of str to str
        The installed packages, name to version.
    tests : str
        pytest's count, such as `161 passed, 2 skipped`.
    failed : str
        The step that failed: interpreter, environment, versions, install, commands, tests; or interrupted. "" if none did.
    why : str
        The last lines of that step's output.
    seconds : float
    """

    python: str
    choice: str
    packages: Mapping[str, str] = field(default_factory=dict)
    tests: str = ""
    failed: str = ""
    why: str = ""
    seconds: float = 0.0


Run = Callable[..., Ran]


def run(command: Sequence[str], *, cwd: Path, timeout_s: float) -> Ran:
    """Return what a command printed and its exit code; after `timeout_s` seconds it is killed, and the code is 124."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        code = process.returncode
    except BaseException as error:
        _kill(process)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        code = 124
        output += f"\nIt took longer than {timeout_s:g} s.".encode()
    return Ran(code, output.decode(errors="replace"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_project(root: Path) -> Project:
    """Read a project's setup.cfg."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    classifiers = config["metadata"].get("classifiers", "")
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", classifiers)
    allowed = SpecifierSet(config["options"]["python_requires"])
    version = re.search(r'__version__ = "(.+)"', (root / "gluon_mgpu" / "version.py").read_text(encoding="utf-8"))
    return Project(
        version=version.group(1) if version else "",
        pythons=tuple(python for python in pythons if allowed.contains(f"{python}.0")),
        needs=_requirements(config["options"]["install_requires"]),
        dev=_requirements(config["options.extras_require"]["dev"]),
    )


def _requirements(text: str) -> Tuple[Requirement, ...]:
    lines = (line.strip() for line in text.splitlines())
    return tuple(Requirement(line) for line in lines if line and not line.startswith("#"))


def find_interpreter(python: str, *, run: Run = run) -> Interpreter:
    """Return the program of a Python, such as `3.8` or a path: on the PATH, else the newest one of pyenv.

    A program on the PATH that does not run, such as a version manager's placeholder, is skipped.
    """
    if os.sep in python:
        return Interpreter(_version_of(Path(python), run=run) or python, Path(python))
    folder = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    versions = sorted(folder.glob(f"{python}.*/bin/python"), key=_patch, reverse=True)
    on_path = shutil.which(f"python{python}")
    for path in [*([Path(on_path)] if on_path else []), *versions]:
        version = _version_of(path, run=run)
        if version.startswith(f"{python}."):
            return Interpreter(version, path)
    return Interpreter(python, None)


def _patch(path: Path) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", path.parent.parent.name))


def _version_of(path: Path, *, run: Run) -> str:
    """Return the version of a Python, "" if it does not run."""
    try:
        ran = run([path, "-c", "import platform; print(platform.python_version())"], cwd=Path.cwd(), timeout_s=60)
    except OSError:
        return ""
    return ran.output.strip() if ran.code == 0 else ""


def available(name: str, python: Path, *, run: Run = run) -> List[Version]:
    """Return the versions of a package that have a wheel for a Python, oldest first, as its pip finds them.

    pip gets a request for a version that does not exist, and lists the others; `pip index` also lists those without a wheel.
    """
    with tempfile.TemporaryDirectory() as nothing:
        command = [python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", nothing, f"{name}==0"]
        output = run(command, cwd=Path(nothing), timeout_s=120).output
    found = re.search(r"from versions: (.+)\)", output)
    if not found or found.group(1) == "none":
        raise CheckError("versions", f"The registry has no wheel of {name} for {python}: {_last_lines(output)}")
    return sorted(Version(version) for version in found.group(1).split(", "))


def choose(versions: Iterable[Version], allowed: SpecifierSet, which: str) -> str:
    """Return the `oldest` or `newest` allowed release; another `which` is a version, and is returned.

    Examples
    --------
    >>> choose([Version("1.9"), Version("1.21"), Version("2.0")], SpecifierSet(">=1,<2"), "newest")
    '1.21'
    """
    if which not in ("oldest", "newest"):
        return which
    fit = sorted(version for version in allowed.filter(versions) if not version.is_prerelease)
    if not fit:
        raise CheckError("versions", f"No release fits {allowed}.")
    return str(fit[0 if which == "oldest" else -1])


def pins(project: Project, python: Path, short: str, choice: str, oldest_dependencies: bool, *, run: Run = run) -> List[str]:
    """Return `numpy==...`, and on request the oldest versions of the other requirements."""
    found = []
    for requirement in project.needs:
        which = choice if requirement.name == "numpy" else "oldest" if oldest_dependencies else ""
        if which and (requirement.marker is None or requirement.marker.evaluate({"python_version": short})):
            known = available(requirement.name, python, run=run) if which in ("oldest", "newest") else []
            found.append(f"{requirement.name}=={choose(known, requirement.specifier, which)}")
    return found


def copy_project(source: Path, folder: Path) -> Path:
    """Copy the project into a folder and return the copy: building leaves files, and the project may change meanwhile."""
    to = folder / "project"
    shutil.copytree(source, to, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    return to


def check(
    interpreter: Interpreter,
    choice: str,
    *,
    project: Project,
    source: Path,
    folder: Path,
    tests: str = "contract",
    oldest_dependencies: bool = False,
    timeout_s: float = 600,
    tell: Callable[[str], None] = lambda line: None,
    run: Run = run,
) -> Result:
    """Return the result of one combination: install, commands and tests in a new environment, which is then removed.

    Parameters
    ----------
    interpreter : Interpreter
    choice : str
        `oldest` or `newest` NumPy that this Python and setup.cfg allow, or a version.
    project : Project
    source : Path
        A copy of the project, in which pip builds and pytest runs.
    folder : Path
        For the environment, and for the log, which is kept.
    tests : str
        `contract` or `all`.
    oldest_dependencies : bool
        Whether to use the oldest allowed versions of the other requirements, click and rich.
    timeout_s : float, seconds
        For each step.
    tell : callable
        Gets a line of progress.
    run : callable
        As `run`.
    """
    started = time.monotonic()
    result = Result(interpreter.python, choice)
    name = f"python-{interpreter.python}-numpy-{choice}" + ("-oldest-dependencies" if oldest_dependencies else "")
    environment, log = folder / name, folder / f"{name}.log"

    def step(kind: str, *command: object) -> str:
        tell(f"{kind}: {_short(command)}")
        ran = run(command, cwd=source, timeout_s=timeout_s)
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(map(str, command))}\n{ran.output}\nexit code {ran.code}\n\n")
        if ran.code:
            raise CheckError(kind, _last_lines(ran.output))
        return ran.output

    try:
        if interpreter.path is None:
            raise CheckError("interpreter", f"There is no python{interpreter.python} on the path or in pyenv's folder.")
        step("environment", interpreter.path, "-m", "venv", "--clear", environment)
        python, short = environment / "bin" / "python", ".".join(interpreter.python.split(".")[:2])
        pinned = pins(project, python, short, choice, oldest_dependencies, run=run)
        extras, testers = ("cpu,train,dev", []) if tests == "all" else ("cpu,train", _testers(project))
        step("install", python, "-m", "pip", "install", "--only-binary", ":all:", f"{source}[{extras}]", *pinned, *testers)
        step("install", python, "-m", "pip", "check")
        result = replace(result, packages=json.loads(step("install", python, "-c", _ASK_VERSIONS, *_LISTED).splitlines()[-1]))
        step("commands", environment / "bin" / "gluon-mgpu", "doctor", "--devices", "cpu:2")
        output = folder / f"{name}-run"
        words = ["train", "resnet18", "--devices", "cpu:2", "--epochs", "1", "--output", str(output)]
        step("commands", environment / "bin" / "gluon-mgpu", *words)
        # Appended to the path, the copy does not hide the installed package.
        quiet = ["-q", "-p", "no:cacheprovider", "--import-mode=append", "--durations=0", "--durations-min=5"]
        result = replace(result, tests=_count(step("tests", environment / "bin" / "pytest", *quiet, *_TESTS[tests])))
    except CheckError as error:
        result = replace(result, failed=error.step, why=str(error))
    except OSError as error:
        result = replace(result, failed="environment", why=str(error))
    finally:
        for used in (environment, folder / f"{name}-run"):
            shutil.rmtree(used, ignore_errors=True)
    return replace(result, seconds=round(time.monotonic() - started, 1))


_ASK_VERSIONS = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def _short(command: Sequence[object]) -> str:
    """Return a command as one short line, paths by their last part."""
    words = [Path(str(word)).name if os.sep in str(word) else str(word) for word in command]
    return " ".join(" ".join(words).split())[:100]


def _testers(project: Project) -> List[str]:
    return [str(requirement) for requirement in project.dev if requirement.name in _TESTERS]


def _count(output: str) -> str:
    """Return pytest's count of a run that ended well, without its time."""
    counts = re.findall(r"(\d+ (?:passed|skipped|deselected|xfailed).*?)(?: in [\d.]+s.*)?$", output, re.MULTILINE)
    return counts[-1] if counts else "no tests"


def _last_lines(output: str, num_lines: int = 4) -> str:
    """Return the lines that report an error (of pytest, pip or an exception) if there are any, else the last lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(FAILED|ERROR|Error)\b|[\w.]+(Error|Exception): ", line)]
    return " / ".join((telling or lines)[-num_lines:]) or "It printed nothing."


def report(results: Sequence[Result], project: Project, tests: str) -> Dict[str, object]:
    """Return the content of `--json`: the project, the system, the date, and the results."""
    return {
        "project": project.version,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "tests": list(_TESTS[tests]),
        "results": [asdict(result) for result in results],
    }


def rows(results: Sequence[Mapping[str, object]]) -> List[List[str]]:
    """Return the cells of a table of results, as a report holds them."""
    found = []
    for one in results:
        packages: Mapping[str, str] = dict(one["packages"])  # type: ignore[call-overload]
        numpy = packages.get("numpy", "-") + (f" ({one['choice']})" if one["choice"] in ("oldest", "newest") else "")
        cells = [str(one["python"]), numpy, *(packages.get(name, "-") for name in ("click", "rich", "scipy", "scikit-learn"))]
        outcome = f"failed: {one['failed']}" if one["failed"] else str(one["tests"])
        found.append([*cells, outcome, f"{one['seconds']:.0f}"])
    return found


COLUMNS = ["Python", "NumPy", "click", "rich", "SciPy", "scikit-learn", "result", "seconds"]


def as_markdown(content: Mapping[str, object]) -> str:
    """Return a report as a Markdown table, with a line about the project, the system and the date."""
    results: Sequence[Mapping[str, object]] = content["results"]  # type: ignore[assignment]
    lines = [f"gluon_mgpu {content['project']} on {content['system']}, {content['date']}:", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(results)]
    why = [f"- Python {one['python']}, NumPy {one['choice']}, {one['failed']}: {one['why']}" for one in results if one["failed"]]
    return "\n".join([*lines, *(["", *why] if why else [])])


def read_reports(files: Sequence[Path]) -> Dict[str, object]:
    """Return the reports in several files as one, in the order of their Pythons."""
    content = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    results = [result for one in content for result in one["results"]]
    results.sort(key=lambda one: (Version(one["python"]), one["choice"] != "oldest"))
    return {**content[-1], "results": results}


def print_report(content: Mapping[str, object], *, markdown: bool, as_json: bool) -> None:
    """Print a report as a table, as Markdown or as JSON."""
    if as_json:
        click.echo(json.dumps(content, indent=1))
    elif markdown:
        click.echo(as_markdown(content))
    else:
        table = Table(*COLUMNS)
        results: Sequence[Mapping[str, object]] = content["results"]  # type: ignore[assignment]
        for row in rows(results):
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 130).print(table)
        for one in results:
            if one["failed"]:
                click.echo(f"Python {one['python']}, NumPy {one['choice']}, {one['failed']}: {one['why']}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--python", "pythons", multiple=True, metavar="X.Y|PATH", help="By default all that setup.cfg names.")
@click.option(
    "--numpy",
    "choices",
    multiple=True,
    default=("oldest", "newest"),
    show_default=True,
    metavar="oldest|newest|VERSION",
    help="Of those with a wheel for the Python that setup.cfg allows.",
)
@click.option("--oldest-dependencies", is_flag=True, help="Also use the oldest click and rich that setup.cfg allows.")
@click.option(
    "--tests", type=click.Choice(sorted(_TESTS)), default="contract", show_default=True, help="The contracts, or the full suite."
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=600, show_default=True, help="Seconds for each step.")
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/compatibility"),
    show_default=True,
    help="Folder for what each step printed.",
)
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--read",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run nothing: print what --json has written. Several times.",
)
def main(
    pythons: Sequence[str],
    choices: Sequence[str],
    oldest_dependencies: bool,
    tests: str,
    timeout_s: float,
    logs: Path,
    markdown: bool,
    as_json: bool,
    files: Sequence[Path],
) -> None:
    """Install this project with every Python and the oldest and newest NumPy that it allows, and try it there.

    Needs those Pythons, on the path or in pyenv's folder, and a network. Progress goes to standard error.
    """
    if files:
        content = read_reports(files)
    else:
        project = read_project(ROOT)
        found = _check_all(
            [find_interpreter(python) for python in pythons or project.pythons],
            choices,
            project=project,
            tests=tests,
            oldest_dependencies=oldest_dependencies,
            timeout_s=timeout_s,
            logs=logs,
        )
        content = report(found, project, tests)
    print_report(content, markdown=markdown, as_json=as_json)
    results: Sequence[Mapping[str, object]] = content["results"]  # type: ignore[assignment]
    sys.exit(1 if any(one["failed"] for one in results) else 0)


def _check_all(
    interpreters: Sequence[Interpreter],
    choices: Sequence[str],
    *,
    project: Project,
    tests: str,
    oldest_dependencies: bool,
    timeout_s: float,
    logs: Path,
) -> List[Result]:
    """Return the results of all combinations; of those that have ended where Ctrl-C came."""
    logs.mkdir(parents=True, exist_ok=True)
    combinations = [(interpreter, choice) for interpreter in interpreters for choice in dict.fromkeys(choices)]
    results: List[Result] = []
    with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
        source = copy_project(ROOT, Path(folder))
        for i, (interpreter, choice) in enumerate(combinations, 1):
            head = f"[{i}/{len(combinations)}] Python {interpreter.python}, {choice} NumPy"
            try:
                result = check(
                    interpreter,
                    choice,
                    project=project,
                    source=source,
                    folder=Path(folder),
                    tests=tests,
                    oldest_dependencies=oldest_dependencies,
                    timeout_s=timeout_s,
                    tell=lambda line, head=head: click.echo(f"{head}: {line}", err=True),  # type: ignore[misc]
                )
            except KeyboardInterrupt:
                results.append(Result(interpreter.python, choice, failed="interrupted", why="Ctrl-C."))
                break
            finally:
                for log in Path(folder).glob("*.log"):
                    shutil.copy(log, logs)
            results.append(result)
            outcome = f"FAILED in {result.failed}: {result.why}" if result.failed else f"passed: {result.tests}"
            click.echo(f"{head}: {outcome} ({result.seconds:.0f} s)", err=True)
    return results


if __name__ == "__main__":
    main()
