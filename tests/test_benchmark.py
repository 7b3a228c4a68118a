"""The comparisons of scripts/benchmarks: processes, rounds, ratios, and contenders that fail. No test reads a clock."""

import doctest
import json
import os
import re
import runpy
import signal
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import report
import scaling_model
import workloads
from case import Case
from click.testing import CliRunner
from commands import main
from compare import Row, compare
from measure import inputs, run_round

PROGRAM = Path(workloads.__file__).parent
ROOT = PROGRAM.parent.parent
PNG = b"\x89PNG\r\n\x1a\n"
CASE = workloads.quick(workloads.STEPS["mlp"])


def bench(*arguments, exit_code=0):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture
def fake(tmp_path):
    """Make a Python that runs a given program instead of the worker. The program has `say` and `requests`."""

    return partial(make_fake, tmp_path)


def make_fake(folder, name, program):
    path = folder / name
    start = f"#!{sys.executable}\nimport json, os, signal, sys, time\nrequests = map(json.loads, sys.stdin)\n"
    say = "def say(**content):\n    print(json.dumps(content), flush=True)\n"
    path.write_text(start + say + textwrap.dedent(program))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


STEADY = """
    say(versions={})
    for number, request in enumerate(requests):
        say(**({"found": {"whole_s": 1.0 + number}} if "round" in request else {}))
"""


def compared(pythons, rounds=3, timeout_s=20.0):
    """The rows of fake contenders, measured."""
    rows = [Row(name, "1 context", CASE) for name in pythons]
    compare(rows, rounds=rounds, pythons=pythons, timeout_s=timeout_s)
    return rows


def is_running(pid):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def await_(condition, seconds=240):
    for _ in range(seconds * 20):
        if condition():
            return True
        time.sleep(0.05)
    return False


# The four comparisons, end to end


STEP_NAMES = {"dispatch_s", "split_s", "forward_s", "backward_s", "update_s", "whole_s"}
FAKE_GLUON = f"""
    say(versions={{}})
    for number, request in enumerate(requests):
        names = ["first_bytes", "last_bytes"] if "memory" in request.get("round", "") else {sorted(STEP_NAMES)}
        say(**({{"found": {{name: 1.0 + number for name in names}}}} if "round" in request else {{}}))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Each comparison run once, in its quick form: the printed output, the JSON, and the folder.

    By default only ours is real, on one device: each process imports MXNet.
    """
    made = {}

    def outcome(workload):
        if workload not in made:
            more = ["--num-devices", "2"] if workload == "train" else []  # and one context with one thread
            folder = tmp_path_factory.mktemp(workload)
            if not request.config.getoption("exhaustive"):
                more += ["--num-devices", "1", "--python", f"gluon={make_fake(folder, 'gluon', FAKE_GLUON)}"]
            output = bench(workload, "--quick", "--contenders", "ours,gluon", "--output", folder, *more)
            made[workload] = output, json.loads((folder / f"{workload}.json").read_text()), folder
        return made[workload]

    return outcome


exhaustive = pytest.mark.exhaustive


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "workload, groups, names",
    [
        ("step", ["1 context", "2 contexts", "memory, 2 contexts"], STEP_NAMES),
        pytest.param("train", None, {"whole_s"}, marks=exhaustive),
        pytest.param("evaluate", None, {"evaluate_s", "accuracy"}, marks=exhaustive),
        pytest.param(
            "size",
            [f"{n} parameters, {k}" for k in ("1 context", "2 contexts") for n in (10, 30)],
            {"update_s", "done_s"},
            marks=exhaustive,
        ),
    ],
)
def test_every_contender_has_every_round(outcomes, workload, groups, names):
    output, found, folder = outcomes(workload)
    rows = found["rows"]
    there = list(dict.fromkeys(row["group"] for row in rows))
    assert groups is None or there == groups
    assert len(there) >= 2
    for group in there:
        assert sorted(row["contender"] for row in rows if row["group"] == group) == ["gluon", "ours"]
    for row in rows:
        memory = row["group"].startswith("memory")
        assert row["reason"] == ""
        assert len(row["rounds"]) == (1 if memory else found["rounds"])
        assert all(set(one) == ({"first_bytes", "last_bytes"} if memory else names) for one in row["rounds"])
        assert all(value > 0 for one in row["rounds"] for name, value in one.items() if name != "accuracy")
        assert row["versions"]["mxnet"] == "1.9.1"
        assert ("gluon_mgpu" in row["versions"]) == (row["contender"] == "ours")
        assert f" {row['contender']} " in output
    assert (folder / f"{workload}.png").read_bytes().startswith(PNG)
    assert output.splitlines()[-1].endswith(f"{workload}.png")


@pytest.mark.parametrize("workload", ["step", *(pytest.param(name, marks=exhaustive) for name in ("train", "evaluate", "size"))])
def test_medians_and_ratios_are_those_of_the_rounds(outcomes, workload):
    _, found, _ = outcomes(workload)
    ours = {row["group"]: row for row in found["rows"] if row["contender"] == "ours"}
    for row in found["rows"]:
        for name in row["rounds"][0]:
            values = np.array([one[name] for one in row["rounds"]])
            theirs = np.array([one[name] for one in ours[row["group"]]["rounds"]])
            assert row["medians"][name] == pytest.approx({"median": np.median(values), "min": values.min(), "max": values.max()})
            if name.endswith("_s"):
                ratios = values / theirs
                expected = {"median": np.median(ratios), "min": ratios.min(), "max": ratios.max()}
                assert row["ratios"][name] == pytest.approx(expected)


def test_the_file_holds_machine_and_command(outcomes):
    _, found, _ = outcomes("step")
    assert found["benchmark"] == "step"
    assert found["rounds"] == 2
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert found["machine"]["processor"]
    assert found["command"][:2] == ["python", "scripts/benchmarks"]
    assert [table["title"] for table in found["tables"]][0] == "contenders"
    for row in found["rows"]:
        assert row["environment"]["OMP_NUM_THREADS"] == "1"
        assert row["case"]["num_layers"] == CASE.num_layers


@exhaustive
def test_ours_and_gluon_find_the_same_accuracy(outcomes):
    _, found, _ = outcomes("evaluate")
    assert len({one["accuracy"] for row in found["rows"] for one in row["rounds"]}) == 1


def test_the_folder_is_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--help"])
    monkeypatch.chdir("/")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    output = capsys.readouterr().out
    assert ended.value.code == 0
    assert output.startswith("Usage: python scripts/benchmarks ")
    commands = [
        "balance",
        "checkpoint",
        "evaluate",
        "hybrid",
        "pipeline",
        "precision",
        "scaling",
        "seq2seq",
        "size",
        "step",
        "trace",
        "train",
    ]
    assert sorted(main.commands) == commands
    assert all(f"\n  {name} " in output for name in commands)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_help_describes_every_option(name):
    output = bench(name, "--help")
    for parameter in main.commands[name].params:
        assert parameter.help and all(flag in output for flag in parameter.opts)


@pytest.mark.parametrize("path", [*sorted((ROOT / "docs").glob("*.md")), PROGRAM / "RESULTS.md"], ids=lambda path: path.name)
def test_commands_on_pages_have_the_options(path):
    for words in re.findall(r"python scripts/benchmarks ([^`#]*)", path.read_text(encoding="utf-8")):
        name, *rest = words.split()
        flags = {flag for parameter in main.params for flag in parameter.opts} | {"--help"}
        if not name.startswith("-"):
            flags |= {flag for parameter in main.commands[name].params for flag in parameter.opts + parameter.secondary_opts}
        assert {word for word in [name, *rest] if word.startswith("--")} <= flags


@pytest.mark.parametrize("module", [report, scaling_model], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


# Contenders that fail


@exhaustive
def test_a_contender_that_is_not_installed_is_reported(tmp_path):
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
    bare.chmod(0o755)
    python = [f"--python={name}={bare}" for name in ("gluon", "torch")]
    output = bench("evaluate", "--quick", "--num-devices", "1", "--contenders", "ours,gluon,torch", *python, "--output", tmp_path)
    ours, gluon, torch = json.loads((tmp_path / "evaluate.json").read_text())["rows"]
    assert ours["reason"] == "" and len(ours["rounds"]) == 2
    assert gluon["reason"].startswith("not installed: pip install ")
    assert torch["reason"].startswith("not installed: pip install ")
    assert gluon["rounds"] == torch["rounds"] == []
    assert " ".join(output.split()).count("not installed") == 2
    assert gluon["medians"] == gluon["ratios"] == {}


@pytest.mark.parametrize("workload, contender", [("step", "torch"), ("step", "torch-ddp"), ("train", "torch"), ("size", "gluon")])
def test_a_run_without_any_measurement_says_why(tmp_path, workload, contender):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho sorry >&2\n")
    broken.chmod(0o755)
    options = ["--contenders", contender, "--python", f"{contender}={broken}", "--num-devices", "1", "--output", tmp_path]
    output = bench(workload, "--quick", *options)
    rows = json.loads((tmp_path / f"{workload}.json").read_text())["rows"]
    assert [row["reason"] for row in rows] == ["ended with exit status 0: sorry"] * len(rows)
    assert ("sorry" in output) == bool(rows) == (contender != "torch-ddp")  # which runs on two contexts only
    assert (tmp_path / f"{workload}.png").read_bytes().startswith(PNG)


def test_a_crash_leaves_the_other_contenders(fake):
    pythons = {
        "ours": fake("steady", STEADY),
        "gluon": fake("crashing", STEADY + "        if number == 2:\n            os.kill(os.getpid(), signal.SIGSEGV)\n"),
        "d2l": fake("leaving", "say(versions={})\nnext(requests)\nsys.exit('out of ideas')"),
    }
    ours, gluon, d2l = compared(pythons, rounds=4)
    assert (ours.reason, len(ours.rounds)) == ("", 4)
    assert gluon.reason == "in round 3: crashed with SIGSEGV"
    assert len(gluon.rounds) == 2
    assert d2l.reason == "ended with exit status 1: out of ideas"
    assert report.ratio(gluon, ours, "whole_s") is None
    assert report.measured([ours, gluon, d2l]) == [ours]


def test_a_contender_that_fails_is_not_asked_again(fake):
    failing = (
        "say(versions={})\nnext(requests)\nsay()\nnext(requests)\nsay(failed='ValueError: no')\nfor _ in requests:\n    1 / 0"
    )
    ours, gluon = compared({"ours": fake("steady", STEADY), "gluon": fake("failing", failing)})
    assert gluon.reason == "in round 1: ValueError: no"
    assert len(ours.rounds) == 3


def test_a_contender_that_hangs_is_ended_with_its_children(fake, tmp_path):
    pids = tmp_path / "pids"
    hanging = f"""
        child = os.fork()
        if child:
            open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child}}")
            say(versions={{}})
            next(requests)
            say()
        time.sleep(10000)
    """
    ours, gluon = compared({"ours": fake("steady", STEADY), "gluon": fake("hanging", hanging)}, timeout_s=5.0)
    assert gluon.reason == "in round 1: no answer within 5 s"
    assert len(ours.rounds) == 3
    assert await_(lambda: not any(is_running(pid) for pid in pids.read_text().split()))


def test_a_contender_that_answers_nonsense_or_cannot_start(fake, tmp_path):
    (tmp_path / "text").write_text("")
    rows = compared({"ours": fake("babbling", "print('hello', flush=True)"), "gluon": str(tmp_path / "text")})
    assert rows[0].reason == "answered b'hello'"
    assert rows[1].reason.endswith("text: Permission denied")


def test_output_of_a_contender_s_library_is_not_an_answer(tmp_path):
    (tmp_path / "torch.py").write_text("import os\nprint('a greeting', flush=True)\nos.write(1, b'another')\n__version__ = '0'\n")
    loud = tmp_path / "loud"
    loud.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    loud.chmod(0o755)
    (row,) = compared({"torch": str(loud)}, rounds=1, timeout_s=60)
    assert row.versions["torch"] == "0"
    assert row.reason.startswith("AttributeError: module 'torch' has no attribute ")


@exhaustive
def test_ctrl_c_ends_every_child(tmp_path):
    marker = str(tmp_path / "results")
    command = [
        sys.executable,
        str(PROGRAM),
        "step",
        "--contenders",
        "ours,gluon",
        "--num-devices",
        "1",
        "--output",
        marker,
    ]
    process = subprocess.Popen([*command, "--rounds", "1000"], stderr=subprocess.PIPE, start_new_session=True, text=True)
    try:
        for line in process.stderr:
            if line.startswith("round 1"):
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(process.pid, signal.SIGINT)
        process.stderr.read()
        assert process.wait(240) == 130
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
    assert await_(lambda: not any(is_running(pid) for pid in children))
    assert not os.path.exists(marker)


@exhaustive
def test_a_killed_program_leaves_no_child():
    program = """
        import workloads
        from compare import compare
        compare(workloads.step_rows(["gluon"], [1]), rounds=1000, on_message=lambda text: print(text, flush=True))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROGRAM)
    try:
        for line in process.stdout:
            if line.startswith("round 1"):
                break
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    assert await_(lambda: not is_running(child))


# How contenders are compared


def test_contenders_take_turns(fake, tmp_path):
    log = tmp_path / "log"
    writing = f"""
        say(versions={{}})
        for request in requests:
            if "round" in request:
                open({str(log)!r}, "a").write(os.path.basename(sys.argv[0]) + " ")
            say(found={{"whole_s": 1.0}})
    """
    compared({name: fake(name, writing) for name in ("ours", "gluon", "d2l")}, rounds=3)
    assert log.read_text().split() == ["ours", "gluon", "d2l", "d2l", "gluon", "ours", "ours", "gluon", "d2l"]


def test_programs_run_as_published_get_none_of_our_settings(fake, monkeypatch):
    """Importing gluon_mgpu has put settings into this process's environment."""
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "128")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    echo = """
        say(versions={name: os.environ.get(name, "") for name in ("MXNET_CPU_TEMP_COPY", "OMP_NUM_THREADS", "PATH")})
        for request in requests:
            say(found={})
    """
    _, rows = workloads.train_rows(["d2l", "gluon-defaults", "gluon"], [2])
    compare(rows, rounds=1, pythons=dict.fromkeys(["d2l", "gluon-defaults", "gluon"], fake("echo", echo)))
    found = {row.contender: row.versions for row in rows if row.case.num_devices == 2}
    path = os.environ["PATH"]
    assert found["d2l"] == found["gluon-defaults"] == {"MXNET_CPU_TEMP_COPY": "", "OMP_NUM_THREADS": "", "PATH": path}
    assert found["gluon"]["MXNET_CPU_TEMP_COPY"] == "128"
    assert found["gluon"]["OMP_NUM_THREADS"] != "7"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gluon", "False False"),
        pytest.param("ours", "True False", marks=exhaustive),
        pytest.param("torch", "False False", marks=exhaustive),
    ],
)
def test_only_ours_imports_the_package(name, expected):
    program = """
        import sys
        sys.path.insert(0, {folder!r})
        if {name!r} == "gluon":  # importing the real MXNet takes seconds
            from unittest.mock import MagicMock
            sys.modules.update({{name: MagicMock() for name in ("mxnet", "mxnet.gluon")}})
        import worker
        worker.find_contender({name!r}, "step")
        print("gluon_mgpu.runtime" in sys.modules, "torch" in sys.modules)
    """
    code = textwrap.dedent(program.format(folder=str(PROGRAM), name=name))
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == expected


def test_a_round_waits_before_each_part():
    calls = []

    class Contender:
        parts = ("split", "update")

        def __getattr__(self, name):
            return lambda: calls.append(name)

    found = run_round(Contender(), replace(CASE, repeats=2, num_steps=3))
    parts = ["wait", "split", "wait", "update", "wait", "step"] * 2
    assert calls == ["step", "wait", *parts, "wait", "step", "step", "step", "wait"]
    assert set(found) == {"split_s", "update_s", "dispatch_s", "whole_s"}


def test_inputs_are_the_same_for_all_contenders():
    case = Case("evaluate", network="resnet18", image_size=6, batch_size=3, num_batches=2)
    batches = inputs(case)
    assert [(X.shape, y.shape) for X, y in batches] == [((3, 1, 6, 6), (3,))] * 2
    for (X, y), (again, label) in zip(batches, inputs(case)):
        assert np.array_equal(X, again)
        assert np.array_equal(y, label)


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    """Not the ratio of the medians: a slow moment affects both values of a round."""
    ours = Row("ours", "g", CASE, rounds=[{"t_s": 1.0}, {"t_s": 10.0}, {"t_s": 2.0}])
    other = Row("gluon", "g", CASE, rounds=[{"t_s": 3.0}, {"t_s": 20.0}, {"t_s": 2.0}])
    assert report.ratio_to_ours(other, [ours, other], "t_s") == report.Spread(2.0, 1.0, 3.0)
    assert median([3.0, 20.0, 2.0]) / median([1.0, 10.0, 2.0]) == 1.5
    assert report.ratio_to_ours(other, [other], "t_s") is None


def test_pytorch_has_rows_for_the_devices_it_supports():
    rows = workloads.step_rows(workloads.STEP_CONTENDERS, [1, 2, 4])
    there = {(row.contender, row.case.num_devices) for row in rows if row.contender.startswith("torch")}
    assert there == {("torch", 1), ("torch-compile", 1), ("torch-ddp", 2)}
    assert {row.case.num_devices for row in rows if row.contender == "gluon"} == {1, 2, 4}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["step", "--contenders", "ours,unknown"], "got 'unknown'"),
        (["size", "--contenders", "d2l"], "expected some of ours, ours-static, gluon"),
        (["train", "--python", "d2l"], "expected NAME=PATH"),
        (["train", "--python", "d2l=/does/not/exist"], "expected NAME=PATH"),
        (["train", "--python", f"unknown={sys.executable}"], "expected NAME=PATH"),
        (["evaluate", "--num-devices", "0"], "whole numbers of 1 or more"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments, message):
    output = bench(*arguments, exit_code=2)
    assert message in " ".join(output.split())
