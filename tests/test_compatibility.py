"""scripts/check_compatibility.py: which versions it takes, what it does about failures, what it prints. Nothing is installed."""

import sys
from pathlib import Path

import check_compatibility
import pytest

ROOT = Path(__file__).parent.parent


def test_the_project_s_own_configuration_is_read():
    found = check_compatibility.read_project(ROOT)
    assert found.pythons == ("3.8", "3.9", "3.10", "3.11", "3.12")
    assert "1.26.4" in found.numpy and "2.0.0" not in found.numpy
    assert {"cpu", "cu112", "train", "d2l", "dev"} <= set(found.extras) and "horovod" not in found.extras
    assert {tester.split(">")[0] for tester in found.testers} == set(check_compatibility._TESTERS)


def test_a_command_runs_without_what_was_set_for_others(tmp_path, monkeypatch):
    for name in ("PYTHONPATH", "MXNET_ENGINE_TYPE", "GLUON_MGPU_DEBUG", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "-x")
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    program = "import os; print(sorted(n for n in os.environ if n.startswith(('PYTHON', 'MXNET', 'GLUON', 'PYTEST', 'PIP_T'))))"
    ran = check_compatibility.run([sys.executable, "-S", "-c", program], cwd=tmp_path, timeout_s=60)
    assert ran == check_compatibility.Ran(0, "['PIP_TIMEOUT']\n")


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    # Both hold the pipe: a run that waited for one would not end.
    ran = check_compatibility.run(["sh", "-c", "echo begun; sleep 10000 & sleep 10000"], cwd=tmp_path, timeout_s=2.0)
    assert (ran.code, ran.output) == (124, "begun\n\nIt took longer than 2 s.")


@pytest.mark.parametrize("failed", [None, ("3.9", "oldest")])
def test_the_command_tries_every_combination_and_exits_with_1_after_a_failure(monkeypatch, tmp_path, capsys, failed):
    asked = []

    def found(one, python, which, project):
        asked.append((python, which))
        return python, "1.20.0", "failed: tests: FAILED a | b" if (python, which) == failed else "3 passed"

    monkeypatch.setattr(check_compatibility, "check", found)
    monkeypatch.setattr(check_compatibility.shutil, "copytree", lambda *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        check_compatibility.main(["--python", "3.9", "--python", "3.10", "--logs", str(tmp_path / "logs")])
    assert ended.value.code == (1 if failed else 0)
    assert asked == [(python, which) for python in ("3.9", "3.10") for which in ("oldest", "newest", "extras")]
    output = capsys.readouterr().out
    assert output.count("| 3 passed |") == (5 if failed else 6)
    assert ("| 3.9 | 1.20.0 | failed: tests: FAILED a / b |" in output) == bool(failed)
