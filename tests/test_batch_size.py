"""find_batch_size: the search, what fits, what fails, what hangs; each probe ends with all that it has started."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import mxnet as mx
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.main import main
from gluon_mgpu.errors import DeviceError, StepError, TrainerError
from gluon_mgpu.tuning.batch_size_search import (
    INSIDE,
    BatchSizes,
    NoMemoryError,
    Probe,
    _raise_end,
    ask,
    find_batch_size,
    recommend,
    resnet18_workload,
    search,
)
from gluon_mgpu.tuning.workload import load_workload, reference_of, step_of
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon

from .batch_size_workloads import small_mlp

MIB = 2**20
HERE = "tests.batch_size_workloads"


def failing(how, **options):
    return ask(f"{HERE}:{how}", "cpu", 4, **options)


def running(*words):
    """The ids of the processes whose command line has these words. A zombie has no command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def fake(monkeypatch):
    """Let probes answer as told instead of being run: `fits(batch_size)` returns bytes, or raises."""

    def use(fits, devices=("cpu(0)",), room=1000, used=10):
        asked = []

        def answer(workload, devices_, batch_size=0, *, limit_bytes=0, timeout_s):
            asked.append((batch_size, limit_bytes))
            found = fits(batch_size) if batch_size else used
            return {"devices": list(devices), "room_bytes": room, "memory_bytes": found, "examples_per_s": [1.0, 2.0, 3.0]}

        monkeypatch.setattr("gluon_mgpu.tuning.batch_size_search.ask", answer)
        return asked

    return use


# The search


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 100), st.integers(1, 9))
def test_the_search_finds_what_trying_all_would(largest, most, first, multiple_of):
    tried = []
    found = search(lambda n: tried.append(n) or n <= largest, first=first, most=most, multiple_of=multiple_of)
    assert found == max([n for n in range(multiple_of, most + 1, multiple_of) if n <= largest], default=0)
    assert len(set(tried)) == len(tried) <= 2 * 13
    assert all(n % multiple_of == 0 and multiple_of <= n <= most for n in tried)


def test_the_recommended_batch_is_the_smallest_within_5_percent_of_the_best():
    def probes(*rates):
        return [Probe(2**i, rate > 0, 1, (rate,) if rate else ()) for i, rate in enumerate(rates)]

    assert recommend(probes(50, 94, 95, 100, 99, 0)) == 4
    assert recommend(probes(50, 94.9, 94.9, 100, 0)) == 8
    assert recommend(probes(100, 50, 20)) == 1


# What fits


def test_on_gpus_the_fullest_one_decides(fake):
    """The process's own memory is not watched: 0."""
    asked = fake(lambda batch_size: 10 * batch_size, devices=["gpu(0)", "gpu(1)", "gpu(2)"], room=505)
    found = find_batch_size(small_mlp, ctx="gpu", first=16)
    assert (found.largest, found.memory_limit_bytes) == (48, 505)
    assert asked == [(0, 0), (18, 0), (36, 0), (72, 0), (54, 0), (45, 0), (48, 0), (51, 0)]


def test_on_cpu_contexts_the_process_is_watched(fake):
    asked = fake(lambda batch_size: 10 * batch_size)
    assert find_batch_size(small_mlp, memory_limit_bytes=165).largest == 16
    assert asked[1:] == [(n, 165) for n in (16, 32, 24, 20, 18, 17)]


# What fails


@pytest.mark.parametrize("how", [pytest.param("bad_alloc", marks=pytest.mark.exhaustive), "mxnet_allocation"])
def test_a_lack_of_memory_is_reported_as_one(how):
    with pytest.raises(NoMemoryError) as caught:
        failing(how)
    assert caught.value.peak_bytes > 100 * MIB


def test_another_failure_is_reported_as_what_it_is():
    with pytest.raises(StepError) as caught:
        failing("value")
    assert f"got ValueError: 7 examples from {HERE}:value with a batch of 4; expected" in str(caught.value)
    assert "in step\n" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "code, log, kind, told",
    [
        (-signal.SIGKILL, "", NoMemoryError, "was ended by SIGKILL: without output"),
        (1, "OSError: [Errno 12] Cannot allocate memory", NoMemoryError, "Cannot allocate memory"),
        (-signal.SIGSEGV, "", StepError, "was ended by SIGSEGV"),
        (255, "Segmentation fault: 11", StepError, "ended with exit status 255 (Segmentation fault: 11)"),
        (-signal.SIGABRT, "a\npython: t.cc:1: Assertion `rows > 0' failed.", StepError, "Assertion `rows > 0' failed."),
        (3, "bye", StepError, "ended with exit status 3 (bye)"),
    ],
)
def test_how_a_process_ends_tells_why(code, log, kind, told):
    with pytest.raises(kind) as caught:
        _raise_end(code, log, "a:b with a batch of 4", 7)
    assert told in str(caught.value)
    if kind is NoMemoryError:
        assert caught.value.peak_bytes == 7


def test_where_nothing_fits_there_is_no_answer(fake):
    fake(lambda batch_size: 2000)
    with pytest.raises(StepError):
        find_batch_size(small_mlp)


def test_a_hang_ends():
    with pytest.raises(StepError, match="no answer within 1 s"):
        failing("hang", timeout_s=1)
    assert running("gluon_mgpu.tuning.batch_size_search", f"{HERE}:hang") == []


# Where the workload is found


def test_a_file_brings_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "nowhere")
    (tmp_path / "neighbour_of_a_workload.py").write_text("SIZE = 3\n")
    (tmp_path / "trial.py").write_text(
        "from neighbour_of_a_workload import SIZE\ndef make(batch_size, ctx): return batch_size * SIZE"
    )
    monkeypatch.chdir(tmp_path)
    reference = reference_of("find_batch_size", "trial.py:make")
    assert reference == f"{tmp_path}/trial.py:make"
    monkeypatch.chdir("/")
    assert load_workload("find_batch_size", reference)(5, []) == 15


def test_a_search_inside_of_a_probe_is_refused(monkeypatch, fake):
    asked = fake(lambda batch_size: 10)
    monkeypatch.setenv(INSIDE, "1")
    with pytest.raises(TrainerError):
        find_batch_size(small_mlp)
    assert asked == []


def test_a_function_that_no_other_process_finds_is_refused():
    def inside(batch_size, ctx):
        pass

    for workload in (inside, lambda batch_size, ctx: None, Path("x").open, 3, None):
        with pytest.raises(TrainerError):
            reference_of("find_batch_size", workload)


def test_a_function_of_a_script_is_found_by_its_file(monkeypatch):
    """A notebook has no file."""
    typed = type(small_mlp)(small_mlp.__code__, {"__name__": "__main__"})
    typed.__module__, typed.__qualname__ = "__main__", "typed"
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TrainerError):
        reference_of("find_batch_size", typed)
    main.__file__ = __file__
    assert reference_of("find_batch_size", typed) == f"{__file__}:typed"


WRONG = {
    "a name without a function": lambda: find_batch_size("train"),
    "no batch": lambda: find_batch_size(small_mlp, first=0),
    "half a batch": lambda: find_batch_size(small_mlp, max_batch_size=2.5),
    "less than no memory": lambda: find_batch_size(small_mlp, memory_limit_bytes=-1),
    "no time": lambda: find_batch_size(small_mlp, timeout_s=float("nan")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_reported_before_a_process_starts(wrong, fake):
    asked = fake(lambda batch_size: 10)
    with pytest.raises((TrainerError, DeviceError)):
        WRONG[wrong]()
    assert asked == []


@pytest.mark.parametrize("made", [7, None, gluon.nn.Dense(1), (1, 2, 3)], ids=repr)
def test_what_a_workload_returns_is_checked(made):
    with pytest.raises(TrainerError):
        step_of(made, "a:b")


def test_arguments_of_train_batch_are_a_step_and_a_function_is_one():
    step = step_of(small_mlp(4, [mx.cpu(0)]), "a:b")
    assert callable(step) and step_of(step, "a:b") is step
    made = resnet18_workload(2, [mx.cpu(0)])
    assert step_of(made, "a:b")().num_examples == 2


def test_an_answer_holds_rounds_memory_and_devices():
    """A question of no batch only asks for devices and memory."""
    for batch_size, rounds in ((4, 5), (0, 0)):
        answer = ask(f"{HERE}:small_mlp", "cpu*2", batch_size)
        assert len(answer["examples_per_s"]) == rounds and all(rate > 0 for rate in answer["examples_per_s"])
        assert answer["memory_bytes"] > 2**24 and 2**20 < answer["room_bytes"] < 2**50
        assert answer["devices"] == ["cpu(0)", "cpu(1)"]


# The command


def test_the_command_writes_a_table_and_json(tmp_path, monkeypatch):
    probes = (Probe(16, True, 2**29, (90.0, 98.0, 99.0)), Probe(32, True, 2**30, (100.0,)), Probe(64, False, 2**31, (), "[no]"))
    given = {}

    def found(workload, *, on_result, **options):
        given.update(options, workload=workload)
        for number in range(1, len(probes) + 1):
            on_result(BatchSizes(("cpu(0)",), 2**31, probes[:number], 16, 16))
        return BatchSizes(("cpu(0)",), 2**31, probes, 32, recommend(probes))

    monkeypatch.setattr("gluon_mgpu.tuning.batch_size_search.find_batch_size", found)
    arguments = ["--memory-limit", "1.5GiB", "--output", str(tmp_path), "--devices", "cpu"]
    result = CliRunner().invoke(main, ["find-batch-size", *arguments])
    assert result.exit_code == 0, result.output
    assert (given["memory_limit_bytes"], given["ctx"]) == (1610612736, "cpu")
    assert given["workload"] is resnet18_workload
    assert result.output.startswith("training a few steps with each batch size")  # it was silent until the first batch was done
    assert "batch 64: 2.00 GiB, does not fit ([no])\n" in result.output
    assert "no: [no]" in result.output
    assert "largest batch that fits: 32\nrecommended: 16, the smallest within 5 % of the best speed\n" in result.output
    assert "hyper-parameter" in result.output
    written = json.loads((tmp_path / "batch_size.json").read_text())
    assert (written["recommended"], written["probes"][0]["examples_per_s"]) == (16, [90.0, 98.0, 99.0])


@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_search_that_is_stopped_writes_what_it_has_measured(tmp_path, fake, signum, code):
    """Hours of probes were lost."""

    def probe(batch_size):
        if batch_size == 64:
            os.kill(os.getpid(), signum)
            time.sleep(60)
        return 10 * batch_size

    fake(probe)
    handler = signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(main, ["find-batch-size", "--output", str(tmp_path), "--devices", "cpu"])
    assert result.exit_code == code, result.output
    written = json.loads((tmp_path / "batch_size.json").read_text())
    assert [one["batch_size"] for one in written["probes"]] == [16, 32]
    assert written["largest"] == 32
    assert signal.getsignal(signal.SIGTERM) is handler
