"""scripts/check_compatibility.py: which versions it takes, what it does about failures, what it prints. Nothing is installed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_compatibility", ROOT / "scripts" / "check_compatibility.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def project(script):
    needs = ("numpy>=1.17,<2", "click>=8", 'setuptools>=65; python_version >= "3.12"')
    dev = ("pytest>=8", "ruff==0.17.5", "pytest-timeout>=2.3")
    return script.Project("0.1.0", ("3.8", "3.12"), tuple(map(Requirement, needs)), tuple(map(Requirement, dev)))


@pytest.fixture
def command(script, capsys):
    """The command: takes arguments, and returns the exit code and what is on either stream."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            script.main(list(arguments))
        return (ended.value.code, *capsys.readouterr())

    return run


class Machine:
    """Stands in for `run`: notes each command, and answers by the first word that it knows in it."""

    def __init__(self, script, **answers):
        self.ran, self.calls, self.where = script.Ran, [], []
        self.answers = {
            "numpy==0": (
                1,
                "ERROR: no such version (from versions: 1.16.6, 1.17.3, 1.9.0, 1.24.4, 1.25.0rc1, 2.0.1)\nERROR: No match",
            ),
            "click==0": (1, "ERROR: no such version (from versions: 7.0, 8.0.0, 8.1.8)"),
            "setuptools==0": (1, "ERROR: no such version (from versions: 64.0.0, 65.0.0, 80.0.0)"),
            "import json": (0, '{"numpy": "1.17.3", "mxnet": "1.9.1"}'),
            "pytest": (0, "....\n(12 durations < 5s hidden.)\n161 passed, 2 skipped in 71.05s (0:01:11)"),
            **answers,
        }

    def __call__(self, command, *, cwd, timeout_s):
        words = [str(word) for word in command]
        self.calls.append(words)
        self.where.append(Path(cwd))
        for told, (code, output) in self.answers.items():
            if any(Path(word).name == told or told in word and "==" in told or told in word and " " in told for word in words):
                return self.ran(code, output)
        return self.ran(0, "")

    def command(self, *words):
        return next((call for call in self.calls if all(word in call for word in words)), None)


def check(script, project, machine, tmp_path, choice="oldest", python="3.8.18", **options):
    interpreter = script.Interpreter(python, Path("/opt/python"))
    return script.check(interpreter, choice, project=project, source=tmp_path, folder=tmp_path, run=machine, **options)


def test_the_project_s_own_configuration_is_read(script):
    found = script.read_project(ROOT)
    assert found.pythons == ("3.8", "3.9", "3.10", "3.11", "3.12")
    assert {expected.name for expected in found.needs} >= {"numpy", "click", "rich"}
    assert {expected.split(">")[0] for expected in script._testers(found)} == {
        "pytest",
        "pytest-timeout",
        "hypothesis",
        "greenlet",
    }
    assert found.version.count(".") == 2


def test_a_python_outside_of_the_range_is_not_tried(script, tmp_path):
    (tmp_path / "gluon_mgpu").mkdir()
    (tmp_path / "gluon_mgpu" / "__init__.py").write_text('__version__ = "7.8"\n')
    (tmp_path / "setup.cfg").write_text(
        "[metadata]\nclassifiers =\n    Programming Language :: Python :: 3.7\n    Programming Language :: Python :: 3.9\n"
        "[options]\npython_requires = >=3.8\ninstall_requires =\n    # why\n    numpy<2\n"
        "[options.extras_require]\ndev =\n    pytest\n"
    )
    found = script.read_project(tmp_path)
    assert (found.version, found.pythons, [str(expected) for expected in found.needs]) == ("7.8", ("3.9",), ["numpy<2"])


@pytest.mark.parametrize(
    "which, expected", [("oldest", "1.17.3"), ("newest", "1.24.4"), ("1.20.0", "1.20.0")], ids=["oldest", "newest", "named"]
)
def test_versions_are_numbers_and_releases_within_the_range(script, which, expected):
    versions = [Version(version) for version in ("1.24.4", "1.9.0", "1.17.3", "1.25.0rc1", "2.0.1", "1.16.6")]
    assert script.choose(versions, SpecifierSet(">=1.17,<2"), which) == expected


def test_no_release_within_the_range_is_told(script):
    with pytest.raises(script.CheckError, match="No release fits <1") as caught:
        script.choose([Version("1.5"), Version("2.0")], SpecifierSet("<1"), "oldest")
    assert caught.value.step == "versions"


def test_the_registry_is_asked_for_wheels_with_the_python_s_own_pip(script):
    machine = Machine(script)
    found = script.available("numpy", Path("/env/bin/python"), run=machine)
    assert [str(version) for version in found] == ["1.9.0", "1.16.6", "1.17.3", "1.24.4", "1.25.0rc1", "2.0.1"]
    (call,) = machine.calls
    assert call[:4] == ["/env/bin/python", "-m", "pip", "download"]
    assert call[call.index("--only-binary") + 1] == ":all:"


@pytest.mark.parametrize(
    "said", ["ERROR: no such version (from versions: none)", "ERROR: Could not connect to the registry"], ids=["none", "offline"]
)
def test_a_registry_without_wheels_is_told(script, said):
    machine = Machine(script, **{"numpy==0": (1, said)})
    with pytest.raises(script.CheckError, match="no wheel of numpy .*ERROR: "):
        script.available("numpy", Path("/env/bin/python"), run=machine)


@pytest.mark.parametrize(
    "short, oldest, expected",
    [
        ("3.8", False, ["numpy==1.17.3"]),
        ("3.8", True, ["numpy==1.17.3", "click==8.0.0"]),
        ("3.12", True, ["numpy==1.17.3", "click==8.0.0", "setuptools==65.0.0"]),
    ],
    ids=["numpy", "click", "markers"],
)
def test_what_is_pinned(script, project, short, oldest, expected):
    assert script.pins(project, Path("python"), short, "oldest", oldest, run=Machine(script)) == expected


def test_a_version_that_is_named_is_not_asked_for(script, project):
    machine = Machine(script)
    assert script.pins(project, Path("python"), "3.8", "1.20.0", False, run=machine) == ["numpy==1.20.0"]
    assert not machine.calls


def test_a_combination_is_installed_checked_tried_and_tested(script, project, tmp_path):
    machine, told = Machine(script), []
    result = check(script, project, machine, tmp_path, tell=told.append)
    assert (result.failed, result.why) == ("", "")
    assert (result.python, result.choice, result.tests) == ("3.8.18", "oldest", "161 passed, 2 skipped")
    assert result.packages == {"numpy": "1.17.3", "mxnet": "1.9.1"}
    install = machine.command("install", "numpy==1.17.3")
    assert f"{tmp_path}[cpu,train]" in install and "pytest>=8" in install and "ruff==0.17.5" not in install
    names = [Path(call[0]).name for call in machine.calls]
    assert names[-3:] == ["gluon-mgpu", "gluon-mgpu", "pytest"]
    assert machine.command("pip", "check") and machine.command("doctor") and machine.command("train", "resnet18")
    assert [line.split(":")[0] for line in told] == ["environment", *["install"] * 3, *["commands"] * 2, "tests"]
    assert (tmp_path / "python-3.8.18-numpy-oldest.log").read_text().count("exit code 0") == len(told)


def test_the_whole_suite_needs_all_that_developers_have(script, project, tmp_path):
    machine = Machine(script)
    assert not check(script, project, machine, tmp_path, tests="all").failed
    assert f"{tmp_path}[cpu,train,dev]" in machine.command("install")
    assert machine.calls[-1][-3:] == ["tests", "--pyargs", "gluon_mgpu"]


def test_the_contract_tests_are_there(script):
    assert script.CONTRACT and all((ROOT / path).exists() for path in script.CONTRACT)


@pytest.mark.parametrize(
    "answers, failed, why",
    [
        ({"venv": (1, "Error: no ensurepip")}, "environment", "Error: no ensurepip"),
        ({"numpy==0": (1, "(from versions: 2.0.1)")}, "versions", "No release fits"),
        ({"install": (1, "Collecting a\nERROR: No matching distribution\nhint")}, "install", "ERROR: No matching distribution"),
        ({"check": (1, "a 1.0 requires b")}, "install", "a 1.0 requires b"),
        ({"doctor": (1, "Traceback\n  File 1\nImportError: no c\n")}, "commands", "ImportError: no c"),
        ({"resnet18": (124, "\nIt took longer than 600 s.")}, "commands", "It took longer than 600 s."),
        (
            {"pytest": (1, "E  assert 1\nFAILED tests/test_a.py::b - assert 1\n1 failed")},
            "tests",
            "FAILED tests/test_a.py::b - assert 1",
        ),
        ({"pytest": (5, "")}, "tests", "It said nothing."),
    ],
    ids=["venv", "versions", "install", "conflict", "doctor", "train", "tests", "silent"],
)
def test_a_failure_says_in_which_step_and_why(script, project, tmp_path, answers, failed, why):
    machine = Machine(script, **answers)
    result = check(script, project, machine, tmp_path)
    assert result.failed == failed
    assert result.why.startswith(why)
    assert not result.tests


def test_nothing_is_run_after_a_failure(script, project, tmp_path):
    machine = Machine(script, install=(1, "ERROR: no"))
    check(script, project, machine, tmp_path)
    assert not machine.command("doctor") and "pytest" not in [Path(call[0]).name for call in machine.calls]


def test_a_python_that_is_not_there_is_a_failure(script, project, tmp_path):
    result = script.check(
        script.Interpreter("3.9", None), "newest", project=project, source=tmp_path, folder=tmp_path, run=Machine(script)
    )
    assert (result.failed, result.why) == ("interpreter", "There is no python3.9 on the path or in pyenv's folder.")


def test_a_program_that_cannot_be_started_is_a_failure(script, project, tmp_path):
    def cannot(command, *, cwd, timeout_s):
        raise PermissionError("Permission denied: /opt/python")

    assert check(script, project, cannot, tmp_path).why == "Permission denied: /opt/python"


def test_the_environment_is_removed_whatever_happens(script, project, tmp_path):
    def make_and_fail(command, *, cwd, timeout_s):
        if "venv" in command:
            (tmp_path / "python-3.8.18-numpy-oldest" / "bin").mkdir(parents=True)
            return script.Ran(0, "")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(script, project, make_and_fail, tmp_path)
    assert not (tmp_path / "python-3.8.18-numpy-oldest").exists()


def test_placeholders_are_passed_over_and_pyenv_s_newest_is_found(script, tmp_path, monkeypatch):
    for version in ("3.9.2", "3.9.18", "3.10.1"):
        (tmp_path / "versions" / version / "bin").mkdir(parents=True)
        (tmp_path / "versions" / version / "bin" / "python").touch()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/shims/{name}")

    def machine(command, *, cwd, timeout_s):
        if str(command[0]).startswith("/shims"):
            return script.Ran(127, "pyenv: python3.9: command not found")
        return script.Ran(0, f"{Path(command[0]).parent.parent.name}\n")

    found = script.find_interpreter("3.9", run=machine)
    assert (found.python, found.path) == ("3.9.18", tmp_path / "versions" / "3.9.18" / "bin" / "python")
    assert script.find_interpreter("3.13", run=machine).path is None
    named = script.find_interpreter(str(tmp_path / "versions" / "3.10.1" / "bin" / "python"), run=machine)
    assert named.python == "3.10.1"


def test_a_command_runs_without_what_was_set_for_others(script, tmp_path, monkeypatch):
    for name in ("PYTHONPATH", "MXNET_ENGINE_TYPE", "GLUON_MGPU_DEBUG", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "-x")
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    program = "import os; print(sorted(n for n in os.environ if n.startswith(('PYTHON', 'MXNET', 'GLUON', 'PYTEST', 'PIP_T'))))"
    ran = script.run([sys.executable, "-S", "-c", program], cwd=tmp_path, timeout_s=60)
    assert ran == script.Ran(0, "['PIP_TIMEOUT']\n")


def test_a_command_that_hangs_is_killed_with_what_it_started(script, tmp_path):
    # Both hold the pipe: a run that waited for one would not end.
    ran = script.run(["sh", "-c", "echo begun; sleep 10000 & sleep 10000"], cwd=tmp_path, timeout_s=2.0)
    assert (ran.code, ran.output) == (124, "begun\n\nIt took longer than 2 s.")


@pytest.mark.parametrize(
    "output, expected",
    [
        ("161 passed in 71.05s (0:01:11)", "161 passed"),
        ("3 passed, 2 skipped, 1 warning in 0.10s", "3 passed, 2 skipped, 1 warning"),
        ("nothing", "no tests"),
    ],
    ids=["long", "skipped", "none"],
)
def test_pytest_s_count_is_read(script, output, expected):
    assert script._count(f"....\n{output}\n") == expected


def some_results(script):
    good = script.Result("3.8.18", "oldest", {"numpy": "1.17.3", "click": "8.1.8"}, "161 passed", "", "", 61.4)
    bad = script.Result("3.12.1", "newest", {"numpy": "1.26.4"}, "", "tests", "FAILED a | b", 7.6)
    return [good, bad]


def test_markdown_has_a_row_a_combination_and_the_reasons(script, project):
    told = script.as_markdown(script.report(some_results(script), project, "contract"))
    head, _, columns, line, *body = told.splitlines()
    assert head.startswith("gluon_mgpu 0.1.0 on Linux ") and line == "|---|---|---|---|---|---|---|---|"
    assert columns == "| Python | NumPy | click | rich | SciPy | scikit-learn | result | seconds |"
    assert body == [
        "| 3.8.18 | 1.17.3 (oldest) | 8.1.8 | - | - | - | 161 passed | 61 |",
        "| 3.12.1 | 1.26.4 (newest) | - | - | - | - | failed: tests | 8 |",
        "",
        "- Python 3.12.1, NumPy newest, tests: FAILED a | b",
    ]


@pytest.fixture
def without_machine(script, monkeypatch, tmp_path):
    """The command, with combinations whose results are given: what it asked for."""
    asked = []

    def found(interpreter, choice, **options):
        asked.append((interpreter.python, choice, options["tests"], options["oldest_dependencies"]))
        if choice == "interrupt":
            raise KeyboardInterrupt
        failed = "tests" if (interpreter.python, choice) == ("3.9", "oldest") else ""
        return script.Result(interpreter.python, choice, {"numpy": "1.20.0"}, "" if failed else "3 passed", failed, failed, 1.0)

    monkeypatch.setattr(script, "check", found)
    monkeypatch.setattr(script, "find_interpreter", lambda python: script.Interpreter(python, Path("/opt/python")))
    monkeypatch.setattr(script, "copy_project", lambda source, folder: folder)
    monkeypatch.chdir(tmp_path)
    return asked


def test_the_command_goes_on_after_a_failure_and_exits_with_1(script, command, without_machine):
    code, output, progress = command("--python", "3.9", "--python", "3.10", "--json")
    assert [one[:2] for one in without_machine] == [("3.9", "oldest"), ("3.9", "newest"), ("3.10", "oldest"), ("3.10", "newest")]
    told = json.loads(output)
    assert [one["failed"] for one in told["results"]] == ["tests", "", "", ""]
    assert told["tests"] == list(script.CONTRACT)
    assert code == 1
    assert "[1/4] Python 3.9, oldest NumPy: FAILED in tests" in progress


def test_the_command_exits_with_0_where_all_passed(command, without_machine):
    code, output, _ = command("--python", "3.9", "--numpy", "newest", "--tests", "all", "--oldest-dependencies")
    assert without_machine == [("3.9", "newest", "all", True)]
    assert (code, "3 passed" in output) == (0, True)


def test_by_default_every_python_of_the_project_is_tried(command, without_machine):
    assert command("--numpy", "newest")[0] == 0
    assert [one[0] for one in without_machine] == ["3.8", "3.9", "3.10", "3.11", "3.12"]


def test_ctrl_c_keeps_the_results_before_it(command, without_machine):
    choices = [word for choice in ("newest", "interrupt", "oldest") for word in ("--numpy", choice)]
    code, output, _ = command("--python", "3.10", *choices, "--json")
    assert [one["failed"] for one in json.loads(output)["results"]] == ["", "interrupted"]
    assert code == 1


def test_saved_results_are_read_as_one_table(script, command, project, tmp_path):
    for name, result in zip(("b.json", "a.json"), some_results(script)):
        (tmp_path / name).write_text(json.dumps(script.report([result], project, "contract")))
    files = ["--read", str(tmp_path / "a.json"), "--read", str(tmp_path / "b.json")]
    code, output, _ = command(*files, "--markdown")
    assert [line.split(" |")[0] for line in output.splitlines() if line.startswith("| 3.")] == ["| 3.8.18", "| 3.12.1"]
    assert code == 1
    assert command(*files[2:])[0] == 0


def test_help_names_every_option(command):
    code, told, _ = command("--help")
    options = ("--python", "--numpy", "--oldest-dependencies", "--tests", "--timeout", "--logs", "--markdown", "--json", "--read")
    assert code == 0 and all(option in told for option in options)


def test_a_copy_leaves_out_what_was_built(script, tmp_path):
    source = tmp_path / "source"
    for name in (".venv/lib", "build/lib", "gluon_mgpu/__pycache__", "gluon_mgpu.egg-info", "gluon_mgpu/data"):
        (source / name).mkdir(parents=True)
    (source / "setup.cfg").touch()
    copy = script.copy_project(source, tmp_path)
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*")) == ["gluon_mgpu", "gluon_mgpu/data", "setup.cfg"]
