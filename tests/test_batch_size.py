"""find_batch_size: the search, what fits, what fails, what hangs; each probe ends with all that it has started."""

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.find_batch_size import find_batch_size_
from gluon_mgpu.errors import DeviceError, StepError, TrainerError
from gluon_mgpu.tuning.batch_size import BatchSizes, Probe, find_batch_size, recommend, search
from gluon_mgpu.tuning.batch_size.find import resnet18_workload
from gluon_mgpu.tuning.batch_size.probe import _answer, _lacks_memory, _measure, _memory, peak_bytes
from gluon_mgpu.tuning.batch_size.process import INSIDE, NoMemoryError, ProbeTimeoutError, _raise_end, _raise_error, ask
from gluon_mgpu.tuning.batch_size.workload import Question, _main_place, load_workload, reference_of, step_of
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon

from .batch_size_workloads import hold_100_mib_an_example, small_mlp
from .conftest import assert_house_style

MIB = 2**20
HERE = "tests.batch_size_workloads"


def failing(how, **options):
    return ask(Question(f"{HERE}:fail_as_told", {"how": how}, "cpu", 4), **options)


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

        def answer(question, *, limit_bytes=0, timeout_s):
            asked.append((question.batch_size, limit_bytes))
            found = fits(question.batch_size) if question.batch_size else used
            return {"devices": list(devices), "room_bytes": room, "memory_bytes": found, "examples_per_s": [1.0, 2.0, 3.0]}

        monkeypatch.setattr("gluon_mgpu.tuning.batch_size.find.ask", answer)
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


def test_the_search_doubles_then_halves():
    tried = []
    assert search(lambda n: tried.append(n) or n <= 100, first=16, most=1000, multiple_of=4) == 100
    assert tried == [16, 32, 64, 128, 96, 112, 104, 100]


def test_the_recommended_batch_is_the_smallest_within_5_percent_of_the_best():
    def probes(*rates):
        return [Probe(2**i, rate > 0, 1, (rate,) if rate else ()) for i, rate in enumerate(rates)]

    assert recommend(probes(50, 94, 95, 100, 99, 0)) == 4
    assert recommend(probes(50, 94.9, 94.9, 100, 0)) == 8
    assert recommend(probes(100, 50, 20)) == 1


def test_the_rate_is_the_median_of_the_rounds():
    assert Probe(8, True, 3 * 2**29, (5.0, 1.0, 4.0)).rate == 4.0
    assert str(Probe(8, True, 3 * 2**29, (5.0, 1.0, 4.0))) == "batch 8: 1.50 GiB, 4 (1 to 5) examples/s, fits"
    assert str(Probe(8, False, 2**30, (), "why")) == "batch 8: 1.00 GiB, does not fit (why)"


# What fits


@pytest.mark.exhaustive
def test_memory_decides():
    """100 MiB an example in 730 MiB, of which the process itself takes more than 130 and less than 230: 5 fit, 6 do not."""
    told, started = [], []
    found = find_batch_size(
        hold_100_mib_an_example,
        devices="cpu",
        memory_limit_bytes=730 * MIB,
        first=5,
        max_batch_size=6,
        on_start=started.append,
        on_message=told.append,
    )
    assert tuple(told) == found.probes and started == [0, 5, 6]
    assert [(probe.batch_size, probe.fits) for probe in told] == [(5, True), (6, False)]
    assert (found.largest, found.devices, found.ended_by, found.memory_limit_bytes) == (5, ("cpu(0)",), "", 730 * MIB)
    assert 630 < told[0].memory_bytes / MIB < 730 < told[1].memory_bytes / MIB < 830
    assert [len(probe.examples_per_s) for probe in told] == [5, 0]
    assert [probe.reason for probe in told] == ["", "more than the limit"]


@pytest.mark.parametrize("num_contexts, steps_to_come", [(1, 16), (2, 4), (4, 0)])
def test_memory_that_later_steps_will_take_counts(num_contexts, steps_to_come, monkeypatch):
    """CPU contexts take, here, 24 temporary buffers in turn; 8 steps are made, of which each takes 64 MiB more."""
    monkeypatch.setattr("gluon_mgpu.tuning.batch_size.probe._ROUND_S", 0)
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "24")
    held = []

    def take() -> None:  # from the system: malloc would give what other tests have left
        held.append(mmap.mmap(-1, 64 * MIB))
        held[-1].write(b"1" * (64 * MIB))

    rounds, coming = _measure(take, num_contexts)
    assert (len(held), len(rounds)) == (8, 5)
    assert coming / MIB == pytest.approx(64 * steps_to_come, rel=0.1)


@pytest.mark.exhaustive
def test_a_network_of_np_arrays_trains_on_two_devices():
    mx.npx.set_np()
    try:
        options = {"first": 3, "max_batch_size": 5, "options": {"np_arrays": True}}
        found = find_batch_size(small_mlp, devices=[mx.cpu(0), mx.cpu(3)], **options)
    finally:
        mx.npx.reset_np()
    assert isinstance(found, BatchSizes)
    assert [probe.batch_size for probe in found.probes] == [4]
    assert (found.largest, found.recommended, found.devices) == (4, 4, ("cpu(0)", "cpu(3)"))
    assert found.ended_by == "the largest batch allowed, 5"
    assert all(100 * MIB < probe.memory_bytes < found.memory_limit_bytes for probe in found.probes)
    assert [len(probe.examples_per_s) for probe in found.probes] == [5]
    assert all(rate > 0 for probe in found.probes for rate in probe.examples_per_s)


def test_the_mode_of_the_caller_is_that_of_the_probe(arrays, monkeypatch):
    modes = []
    monkeypatch.setattr("gluon_mgpu.tuning.batch_size.find.ask", lambda question, **_: modes.append(question.np) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        find_batch_size(small_mlp)
    assert modes == [arrays is mx.np]


def test_on_gpus_the_fullest_one_decides(fake):
    """The process's own memory is not watched: 0."""
    asked = fake(lambda batch_size: 10 * batch_size, devices=["gpu(0)", "gpu(1)", "gpu(2)"], room=505)
    found = find_batch_size(small_mlp, devices="gpu", first=16)
    assert (found.largest, found.memory_limit_bytes) == (48, 505)
    assert asked == [(0, 0), (18, 0), (36, 0), (72, 0), (54, 0), (45, 0), (48, 0), (51, 0)]


def test_on_cpu_contexts_the_process_is_watched(fake):
    asked = fake(lambda batch_size: 10 * batch_size)
    assert find_batch_size(small_mlp, memory_limit_bytes=165).largest == 16
    assert asked[1:] == [(n, 165) for n in (16, 32, 24, 20, 18, 17)]


# What fails


@pytest.mark.parametrize("how", ["bad alloc", "mxnet allocation"])
def test_a_lack_of_memory_is_told_as_one(how):
    with pytest.raises(NoMemoryError) as caught:
        failing(how)
    assert caught.value.peak_bytes > 100 * MIB


def test_another_failure_is_told_as_what_it_is():
    with pytest.raises(StepError) as caught:
        failing("value")
    assert_house_style(caught.value)
    assert f"got ValueError: 7 examples from {HERE}:fail_as_told with a batch of 4; expected" in str(caught.value)
    assert "in step\n" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "code, log, kind, told",
    [
        (-signal.SIGKILL, "", NoMemoryError, "was ended by SIGKILL: without output"),
        (-signal.SIGABRT, "terminate called without an active exception", NoMemoryError, "was ended by SIGABRT"),
        (1, "OSError: [Errno 12] Cannot allocate memory", NoMemoryError, "Cannot allocate memory"),
        (-signal.SIGSEGV, "", StepError, "was ended by SIGSEGV"),
        (255, "Segmentation fault: 11", StepError, "ended with exit status 255 (Segmentation fault: 11)"),
        (-signal.SIGABRT, "a\npython: t.cc:1: Assertion `rows > 0' failed.", StepError, "Assertion `rows > 0' failed."),
        (-signal.SIGABRT, "free(): invalid pointer", StepError, "was ended by SIGABRT (free(): invalid pointer)"),
        (3, "bye", StepError, "ended with exit status 3 (bye)"),
    ],
)
def test_how_a_process_ends_tells_why(code, log, kind, told):
    with pytest.raises(kind) as caught:
        _raise_end(code, log, Question("a:b", {}, "cpu", 4), 7)
    assert told in str(caught.value)
    if kind is StepError:
        assert_house_style(caught.value)
    else:
        assert caught.value.peak_bytes == 7


@pytest.mark.parametrize(
    "error, lack",
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "fork"), True),
        (mx.MXNetError("cudaMalloc retry failed: out of memory"), True),
        (mx.MXNetError("Check failed: e == CUDNN_STATUS_SUCCESS (2 vs. 0) : cuDNN: CUDNN_STATUS_ALLOC_FAILED"), True),
        (mx.MXNetError("Failed to allocate CPU Memory"), True),
        (mx.MXNetError("Size of tensor you are trying to allocate is larger than 2^31 elements"), True),
        (StepError("train_batch: got an error"), False),
        (mx.MXNetError("Shape inconsistent"), False),
        (ValueError("the memory game is out of memory cards"), False),
        (OSError(errno.ENOENT, "data"), False),
    ],
    ids=repr,
)
def test_errors_that_are_a_lack_of_memory(error, lack):
    assert _lacks_memory(error) is lack
    with pytest.raises(StepError) as outer:
        raise StepError("train_batch: got an error of the network") from error
    assert _lacks_memory(outer.value) is lack


def test_where_nothing_fits_there_is_no_answer(fake):
    fake(lambda batch_size: 2000)
    with pytest.raises(StepError, match=r"got more than the limit with a batch of 1, the smallest; expected") as caught:
        find_batch_size(small_mlp)
    assert_house_style(caught.value)


def test_where_not_even_the_libraries_fit_it_is_told(monkeypatch):
    def killed(question, **options):
        raise NoMemoryError("was ended by SIGKILL: without output", 0)

    monkeypatch.setattr("gluon_mgpu.tuning.batch_size.find.ask", killed)
    with pytest.raises(StepError, match="before the first batch") as caught:
        find_batch_size(small_mlp)
    assert_house_style(caught.value)


def test_a_hang_ends():
    with pytest.raises(ProbeTimeoutError, match="no answer within 1 s") as caught:
        failing("hang", timeout_s=1)
    assert_house_style(caught.value)
    assert running("gluon_mgpu.tuning.batch_size.probe", f"{HERE}:fail_as_told") == []


def test_a_hang_of_a_large_batch_leaves_what_was_found_before(fake):
    def hang(batch_size):
        if batch_size > 20:
            raise ProbeTimeoutError("no answer")
        return 10

    fake(hang)
    found = find_batch_size(small_mlp)
    assert (found.largest, found.recommended, len(found.probes), found.ended_by) == (16, 16, 1, "no answer")
    with pytest.raises(ProbeTimeoutError):
        find_batch_size(small_mlp, first=32)


@pytest.mark.exhaustive
def test_ctrl_c_ends_the_probe_and_what_it_has_started():
    question = f"Question('{HERE}:fail_as_told', {{'how': 'hang'}}, 'cpu', 4)"
    code = f"from gluon_mgpu.tuning.batch_size.process import Question, ask; ask({question})"
    root = Path(__file__).parent.parent
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE, start_new_session=True)
    try:
        for _ in range(1200):
            if running("left behind", "by a probe"):
                break
            time.sleep(0.05)
        assert running("left behind", "by a probe")
        os.kill(process.pid, signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=240)[1]
        assert running("left behind", "by a probe") == []
    finally:
        process.kill()
        process.wait()


# Where the workload is found


def test_a_file_brings_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_a_workload.py").write_text("SIZE = 3\n")
    (tmp_path / "trial.py").write_text(
        "from neighbour_of_a_workload import SIZE\ndef make(batch_size, ctx): return batch_size * SIZE"
    )
    monkeypatch.chdir(tmp_path)
    reference = reference_of("trial.py:make")
    assert reference == f"{tmp_path}/trial.py:make"
    monkeypatch.chdir("/")
    assert load_workload(Question(reference, {}, "cpu"))(5, []) == 15


def test_a_search_inside_of_a_probe_is_refused(monkeypatch, fake):
    asked = fake(lambda batch_size: 10)
    monkeypatch.setenv(INSIDE, "1")
    with pytest.raises(TrainerError, match="find_batch_size: got a call from a probe") as caught:
        find_batch_size(small_mlp)
    assert_house_style(caught.value)
    assert asked == []


@pytest.mark.exhaustive
def test_a_script_that_is_not_guarded_is_told(tmp_path):
    """Its file is imported again by the probe, and must not start another search there."""
    script = tmp_path / "trial.py"
    start = "from gluon_mgpu.tuning.batch_size import find_batch_size\ndef make(batch_size, ctx): return list\n"
    script.write_text(f"{start}find_batch_size(make, devices='cpu')\n")
    done = subprocess.run([sys.executable, str(script)], cwd="/", capture_output=True, timeout=240)
    assert done.returncode == 1
    assert "TrainerError: find_batch_size: got a call from a probe" in done.stderr.decode().splitlines()[-1]


def test_a_function_that_no_other_process_finds_is_refused(monkeypatch):
    def inside(batch_size, ctx):
        pass

    typed = type(inside)(inside.__code__, {"__name__": "__main__"})
    typed.__module__, typed.__qualname__ = "__main__", "typed"
    main = type(sys)("__main__")
    main.typed = typed
    monkeypatch.setitem(sys.modules, "__main__", main)
    for workload in (inside, lambda batch_size, ctx: None, Path("x").open, typed, 3, None):
        with pytest.raises(TrainerError, match=r"pass 'workload\.py:make'") as caught:
            reference_of(workload)
        assert_house_style(caught.value)
    main.__file__ = __file__
    assert reference_of(typed) == f"{__file__}:typed"


WRONG = {
    "a name without a function": lambda: find_batch_size("train"),
    "no batch": lambda: find_batch_size(small_mlp, first=0),
    "half a batch": lambda: find_batch_size(small_mlp, max_batch_size=2.5),
    "multiples of nothing": lambda: find_batch_size(small_mlp, multiple_of=True),
    "no memory": lambda: find_batch_size(small_mlp, memory_limit_bytes=0),
    "no time": lambda: find_batch_size(small_mlp, timeout_s=float("nan")),
    "options that are no JSON": lambda: find_batch_size(small_mlp, options={"a": np.ones(2)}),
    "devices that are none": lambda: find_batch_size(small_mlp, devices=[3]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_told_before_a_process_starts(wrong, fake):
    asked = fake(lambda batch_size: 10)
    with pytest.raises((TrainerError, DeviceError)) as caught:
        WRONG[wrong]()
    assert_house_style(caught.value)
    assert asked == []


@pytest.mark.parametrize(
    "workload, options, told",
    [
        (f"{HERE}:small_mlp", {"size": 3}, "unexpected keyword argument 'size'"),
        ("nowhere.at_all:make", {}, "expected a module that can be imported"),
        ("nowhere.py:make", {}, "expected a file that exists"),
        (f"{HERE}:nothing", {}, "expected a function nothing"),
    ],
)
def test_a_workload_that_is_not_there_is_told(workload, options, told, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(TrainerError) as caught:
        load_workload(Question(workload, options, "cpu"))
    assert_house_style(caught.value)
    assert told in str(caught.value)


def test_a_package_that_the_workload_misses_is_not_the_workload(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "workload_that_misses.py").write_text("import nothing_at_all\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nothing_at_all"):
        load_workload(Question("workload_that_misses:make", {}, "cpu"))


@pytest.mark.exhaustive
def test_a_device_that_is_not_there_is_told_before_a_batch_is_tried():
    tried = []
    with pytest.raises(DeviceError, match="got 'tpu'") as caught:
        find_batch_size(small_mlp, devices="tpu", on_message=tried.append)
    assert_house_style(caught.value)
    assert tried == []


def test_an_error_of_this_package_keeps_its_class():
    answer = {"kind": "DeviceError", "message": "use_devices: got 'tpu'", "traceback": "in probe", "no_memory": False}
    with pytest.raises(DeviceError, match="got 'tpu'") as caught:
        _raise_error(answer, Question("a:b", {}, "tpu", 0))
    assert "in probe" in str(caught.value.__cause__)


def test_the_former_name_of_on_message_is_deprecated(fake):
    fake(lambda batch_size: 10 * batch_size)
    tried = []
    with pytest.warns(DeprecationWarning, match="tell= is deprecated.* Pass on_message= instead") as caught:
        found = find_batch_size(small_mlp, tell=tried.append)
    assert tuple(tried) == found.probes != ()
    assert caught[0].filename == __file__
    with pytest.raises(TrainerError, match="got tell= and on_message=; expected one of them") as refused:
        find_batch_size(small_mlp, devices="tpu", tell=tried.append, on_message=tried.append)
    assert_house_style(refused.value)


@pytest.mark.parametrize(
    "options, told",
    [
        (
            {"memory_limit_bytes": 10},
            "got a memory limit of 10 bytes; expected more than the 10 that are in use on cpu(0), cpu(1)",
        ),
        ({"max_batch_size": 1}, "got max_batch_size=1; expected 2 or more"),
    ],
)
def test_too_little_room_is_told_before_a_batch_is_tried(options, told, fake):
    asked = fake(lambda batch_size: 10, devices=["cpu(0)", "cpu(1)"])
    with pytest.raises(TrainerError) as caught:
        find_batch_size(small_mlp, **options)
    assert_house_style(caught.value)
    assert told in str(caught.value)
    assert asked == [(0, 0)]


@pytest.mark.parametrize("made", [7, None, gluon.nn.Dense(1), (1, 2, 3)], ids=repr)
def test_what_a_workload_returns_is_checked(made):
    with pytest.raises(TrainerError, match=r"got \w+ from a:b; expected a function without arguments") as caught:
        step_of(made, "a:b")
    assert_house_style(caught.value)


def test_arguments_of_train_batch_are_a_step_and_a_function_is_one():
    step = step_of(small_mlp(4, [mx.cpu(0)]), "a:b")
    assert callable(step) and step_of(step, "a:b") is step
    made = resnet18_workload(2, [mx.cpu(0)], image_size=8)
    assert step_of(made, "a:b")().num_examples == 2


def test_an_answer_holds_rounds_memory_and_devices(monkeypatch, arrays):
    """As a probe's process gives it; a question of no batch only asks for devices and memory."""
    monkeypatch.setattr("gluon_mgpu.tuning.batch_size.probe._ROUND_S", 0)
    is_np = mx.util.is_np_array()
    for batch_size, rounds in ((4, 5), (0, 0)):
        answer = _answer(Question(f"{HERE}:small_mlp", {"np_arrays": is_np}, "cpu:2", batch_size, np=is_np))
        assert len(answer["examples_per_s"]) == rounds and all(rate > 0 for rate in answer["examples_per_s"])
        assert answer["memory_bytes"] > 2**24 and 2**20 < answer["room_bytes"] < 2**50
        assert answer["devices"] == ["cpu(0)", "cpu(1)"]
    assert json.loads(json.dumps(answer)) == answer and mx.util.is_np_array() == is_np


def test_the_fullest_gpu_and_the_smallest_one_decide(monkeypatch):
    of_gpus = {0: (6 * 2**30, 16 * 2**30), 1: (20 * 2**30, 24 * 2**30)}  # free and total
    monkeypatch.setattr(mx.context, "gpu_memory_info", of_gpus.get)
    assert _memory([mx.gpu(0), mx.gpu(1)], 0.0) == (10 * 2**30, 16 * 2**30)


def test_a_peak_between_two_reads_counts(monkeypatch):
    """The process has answered, and says itself that it held more than the limit."""
    line = json.dumps({"examples_per_s": [1.0], "peak_bytes": 300 * MIB}).encode() + b"\n"
    monkeypatch.setattr("gluon_mgpu.tuning.batch_size.process._watch", lambda *_: (line, 10 * MIB))
    monkeypatch.setattr("gluon_mgpu.tuning.batch_size.process._START", "pass")
    question = Question(f"{HERE}:small_mlp", {}, "cpu", 4)
    assert ask(question, limit_bytes=300 * MIB)["examples_per_s"] == [1.0]
    with pytest.raises(NoMemoryError, match="more than the limit") as caught:
        ask(question, limit_bytes=300 * MIB - 1)
    assert caught.value.peak_bytes == 300 * MIB


def test_a_process_that_has_ended_holds_nothing():
    assert peak_bytes(2**22 + 1) == 0


def test_the_workload_of_a_module_that_runs_is_found_by_its_name(monkeypatch):
    """python -m package.module: its functions are imported from there, not from __main__."""
    main = SimpleNamespace(__spec__=SimpleNamespace(name="package.module"), __file__="/nowhere/module.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert _main_place() == "package.module"
    main.__spec__ = None
    assert _main_place() == ""  # the file is gone, as in a notebook
    main.__file__ = __file__
    assert _main_place() == os.path.abspath(__file__)


# The command


def test_the_command_writes_a_table_json_and_a_picture(tmp_path, monkeypatch):
    probes = (Probe(16, True, 2**29, (90.0, 98.0, 99.0)), Probe(32, True, 2**30, (100.0,)), Probe(64, False, 2**31, (), "[no]"))
    given = {}

    def found(workload, *, on_start, on_message, **options):
        given.update(options, workload=workload)
        on_start(0)
        on_start(16)
        for probe in probes:
            on_message(probe)
        return BatchSizes(("cpu(0)",), 2**31, probes, 32, recommend(probes), ended_by="no answer")

    monkeypatch.setattr("gluon_mgpu.cli.find_batch_size.find_batch_size", found)
    arguments = ["--memory-limit", "1.5GiB", "--image-size", "32", "--output", str(tmp_path), "--devices", "cpu"]
    result = CliRunner().invoke(find_batch_size_, arguments)
    assert result.exit_code == 0, result.output
    assert (given["memory_limit_bytes"], given["options"], given["devices"]) == (1610612736, {"image_size": 32}, "cpu")
    assert given["workload"] is resnet18_workload
    started = "starting a process that checks the devices\ntraining a few steps with a batch of 16\n"
    assert started in result.output  # it was silent until the first batch was done
    assert "batch 64: 2.00 GiB, does not fit ([no])\n" in result.output
    assert "no: [no]" in result.output
    assert "\nNo larger batch was tried: no answer\nlargest batch that fits: 32\n" in result.output
    assert "largest batch that fits: 32\nrecommended: 16, the smallest within 5 % of the best speed\n" in result.output
    assert "hyper-parameter" in result.output
    written = json.loads((tmp_path / "batch_size.json").read_text())
    assert (written["recommended"], written["probes"][0]["examples_per_s"]) == (16, [90.0, 98.0, 99.0])
    assert (tmp_path / "batch_size.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("arguments", [["--memory-limit", "much"], ["--workload", "a:b", "--image-size", "28"], ["--first", "0"]])
def test_wrong_usage_is_told(arguments):
    result = CliRunner().invoke(find_batch_size_, arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output


def test_resnet18_trains_a_batch():
    net, loss, trainer, X, y = resnet18_workload(2, [mx.cpu(0)], image_size=8)
    assert X.shape == (2, 1, 8, 8)
    assert mgpu.train_batch(net, loss, trainer, X, y).num_examples == 2
