"""The report of a machine with GPUs: it is made on one without, says so, and names nobody."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "scripts" / "gpu_report.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("gpu_report", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.exhaustive
def test_a_report_is_made_without_gpus(tmp_path, program):
    """By the command that users type, with a home folder and a name of its own; CUDA sees no GPU, should there be one."""
    home = tmp_path / "home" / "somebody"
    home.mkdir(parents=True)
    environment = {
        **program.os.environ,
        "HOME": str(home),
        "USER": "somebody",
        "LOGNAME": "somebody",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    environment["CUDA_HOME"] = str(home / "file")
    secrets = {"NVIDIA_API_KEY": "nvapi-0123456789", "CUDA_LICENSE": "of-my-company", "GLUON_MGPU_TOKEN": "0123abcd0123abcd"}
    environment.update(secrets, MXNET_SOMETHING="my own remark")
    command = [sys.executable, str(PROGRAM), "--only", "transfer", "--output", str(home / "report.json")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, text=True)
    assert done.returncode == 0, done.stdout
    assert "transfer on CPU contexts: there is no usable GPU" in done.stdout
    assert "No GPU that MXNet can run on: nothing was tried on a GPU." in done.stdout
    assert "doctor was not requested." in done.stdout
    text = (home / "report.json").read_text()
    report = json.loads(text)
    assert report["facts"]["usable_gpus"] == []
    assert {(one["source"], one["target"]) for one in report["transfer"]["transfer"]} == {
        (source, target) for source in ("cpu(0)", "cpu(1)") for target in ("cpu(0)", "cpu(1)")
    }
    assert report["machine"]["environment"]["CUDA_HOME"] == "~/file"
    for hidden in (*secrets, *secrets.values(), "my own remark", "somebody", str(home), str(ROOT)):
        assert hidden not in text
    assert not re.search(rf"\b{re.escape(program.socket.gethostname())}\b", text)


@pytest.mark.parametrize("option", ["--help", "--only nonsense"])
def test_help_and_unknown_parts(option):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *option.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240
    )
    assert (done.returncode == 0) == (option == "--help")
    assert b"doctor, tests, transfer, step, train" in done.stdout or b"'nonsense'" in done.stdout


# Without names


@pytest.mark.parametrize(
    "text, expected",
    [
        ("/home/kim/a.py and /Users/lee/b.py", "~/a.py and ~/b.py"),
        ("/root/a.py, /rooted/a.py", "~/a.py, /rooted/a.py"),
        ("kim@gpubox: kimchi, kim-1", "<user>@<host>: kimchi, kim-1"),
        ("in /opt/x/gluon/a.py, /opt/x/gluon2", "in <project>/a.py, /opt/x/gluon2"),
        ("GPU-0123abcd-0123-abcd-0123-0123456789ab", "<uuid of a GPU>"),
        ("cuBLAS 11.11.3.6", "cuBLAS 11.11.3.6"),
    ],
)
def test_names_are_taken_out(program, text, expected):
    hidden = [("/opt/x/gluon", "<project>"), ("gpubox", "<host>"), ("kim", "<user>")]
    assert program.scrub({"a": [text]}, hidden) == {"a": [expected]}


def test_keys_are_taken_out_and_numbers_left(program):
    assert program.scrub({"kim": (1, 2.5, None, True)}, [("kim", "<user>")]) == {"<user>": [1, 2.5, None, True]}


def test_the_longest_name_goes_first(program, monkeypatch):
    monkeypatch.setattr(program.socket, "gethostname", lambda: "box.kim.example")
    monkeypatch.setattr(program.platform, "node", lambda: "box.kim.example")
    monkeypatch.setenv("USER", "kim")
    assert program.scrub("kim at box.kim.example, box", program.secrets()) == "<user> at <host>, <host>"


def test_keys_reach_neither_the_parts_nor_the_report(program, tmp_path, monkeypatch):
    """A part that prints its environment, as a traceback may, has none to print; what it has from elsewhere is taken out."""
    monkeypatch.setenv("NVIDIA_API_KEY", "nvapi-0123456789")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = program.run([sys.executable, "-c", "import os; print(dict(os.environ))"], tmp_path, 30)
    assert "nvapi" not in done.output and "NVIDIA_API_KEY" not in done.output
    assert "'OMP_NUM_THREADS': '1'" in done.output
    assert program.scrub("key: nvapi-0123456789, MIG-0123abcd-0123-abcd-0123-0123456789ab", program.secrets()) == (
        "key: <secret>, <uuid of a GPU>"
    )
    assert not [name for name in program.ENVIRONMENT if program.SECRET.search(name)]


def test_programs_of_others_are_not_named(program, tmp_path, monkeypatch):
    told = {"gpus": [{"processes": [{"pid": 17, "name": "secret_project"}]}], "problems": ["process 17 (secret_project, 3 GiB)"]}
    monkeypatch.setattr(program, "run", lambda *_, **__: program.Done(1, 2.0, json.dumps(told), "", {}))
    part = program.doctor(tmp_path, [], 30)
    assert part["told"]["gpus"] == [{"processes": [{"pid": 17, "name": "<program>"}]}]
    assert part["told"]["problems"] == ["process 17 (<program>, 3 GiB)"]


# Parts that go wrong


def test_a_part_that_fails_is_told(program, tmp_path):
    done = program.run([sys.executable, "-c", "print('said'); raise SystemExit('why')"], tmp_path, 30)
    assert done.facts() == {**done.facts(), "ended": "exit status 1", "output": "said\n", "errors": "why\n"}


def test_a_part_that_crashes_is_told(program, tmp_path):
    done = program.run([sys.executable, "-c", "import os; os.abort()"], tmp_path, 30)
    assert done.facts()["ended"] == "exit status -6"


def test_a_part_that_takes_too_long_is_ended(program, tmp_path):
    done = program.run([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(10_000)"], tmp_path, 4)
    assert done.facts() == {**done.facts(), "ended": "took too long", "output": "begun\n"}


def test_a_package_that_cannot_be_imported_leaves_a_report(program, tmp_path, monkeypatch):
    """What CUDA's libraries lack is in the report, which ends with 1."""
    monkeypatch.setattr(program, "FACTS", "raise ImportError('import mxnet: got no libcudnn.so.8')")
    report = program.make(tmp_path, [], 30)
    assert report["went_well"] is False
    assert "got no libcudnn.so.8" in report["facts"]["errors"]
    assert report["not_tested"][0] == "No GPU that MXNet can run on: nothing was tried on a GPU."


def test_lines_before_the_json_are_left_out(program):
    assert program.last_json('a warning\n{not json}\n{"a": {"b": 1}}\n') == {"a": {"b": 1}}
    assert program.last_json("nothing") == {}


# Tests


RESULTS = """<testsuites><testsuite>
<testcase name="test_a[gpu]" time="1.234"/>
<testcase name="test_b[1-gpu]" time="0.5"><failure message="short">the whole traceback</failure></testcase>
<testcase name="test_c[gpu-2]" time="0"><skipped message="needs 2 GPUs that MXNet can run on; there is 1"/></testcase>
<testcase name="test_a[rehearsal]" time="0.1"/>
<testcase name="test_d[rehearsal]" time="0.1"><error message="short">of a fixture</error></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read(program, tmp_path):
    (tmp_path / "results.xml").write_text(RESULTS)
    assert program.read_cases(tmp_path / "results.xml") == [
        {"test": "test_a[gpu]", "outcome": "passed", "seconds": 1.23},
        {"test": "test_b[1-gpu]", "outcome": "failed", "seconds": 0.5, "why": "the whole traceback"},
        {"test": "test_c[gpu-2]", "outcome": "skipped", "seconds": 0.0, "why": "needs 2 GPUs that MXNet can run on; there is 1"},
        {"test": "test_a[rehearsal]", "outcome": "passed", "seconds": 0.1},
        {"test": "test_d[rehearsal]", "outcome": "failed", "seconds": 0.1, "why": "of a fixture"},
    ]
    assert program.read_cases(tmp_path / "none.xml") == []


def test_tests_that_ran_on_a_gpu_are_counted_apart(program, tmp_path, monkeypatch):
    (tmp_path / "results.xml").write_text(RESULTS)
    monkeypatch.setattr(program, "run", lambda *_, **__: program.Done(1, 2.0, "said", "", {}))
    part = program.tests(tmp_path, ["gpu(0)"], 30)
    assert part["counts"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert part["on_gpus"] == 2
    assert part["ended"] == "exit status 1"


def test_the_test_file_is_there_and_names_its_runs(program):
    """What tells a run on GPUs from a rehearsal is the name of the test."""
    text = (ROOT / "tests" / "test_gpu.py").read_text()
    assert 'id="gpu", marks=pytest.mark.gpu' in text
    assert [program.is_on_gpu(name) for name in ("test_a[gpu]", "test_gpu[2-even-gpu]", "test_gpu[rehearsal]", "test_gpu")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "gpus, expected",
    [
        ([], "No GPU that MXNet can run on: nothing was tried on a GPU. gpu(0) is too new."),
        (["gpu(0)"], "Only one GPU: sums over two GPUs, NCCL, copies from GPU to GPU"),
        (["gpu(0)", "gpu(1)"], ""),
    ],
)
def test_what_was_not_tested_is_said(program, gpus, expected):
    devices = [{"usable": True, "reason": ""}, {"usable": False, "reason": "gpu(0) is too new."}]
    report = {"facts": {"devices": devices}, "tests": {"ended": "well", "on_gpus": 1}}
    for part in program.PARTS:
        report.setdefault(part, {"ended": "well"})
    told = program.not_tested(gpus, report, list(program.PARTS))
    assert (told[0].startswith(expected) and len(told) == 1) if expected else told == []
    report["step"] = {"ended": "took too long"}
    assert program.not_tested(gpus, report, list(program.PARTS))[-1] == "step failed: took too long."


def test_two_gpus_are_compared_with_one(program):
    assert program.compared(["gpu(0)", "gpu(1)"])[:4] == ["--device", "gpu", "--num-devices", "1,2"]
    assert program.compared(["gpu(0)"])[3] == "1"
    assert "--quick" in program.compared([])
    assert [program.spec(name) for name in ("gpu(0)", "cpu(11)")] == ["gpu:0", "cpu:11"]
