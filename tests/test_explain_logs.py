"""Logs and tracebacks in all their forms: which of their lines is answered."""

import pytest
from gluon_mgpu.explain import explain_log

from .test_explain import first

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    net(x)
{}"""


def test_a_log_is_answered_by_the_last_error_of_its_traceback():
    frames = "\n".join(f'  File "layer.py", line {i}, in forward\n    raise ValueError("no layer {i}")' for i in range(300))
    progress = "\r".join(f"{i}%|### | {i}/100 [00:{i:02d}<00:00, 9.1it/s]" for i in range(60))
    error = "MXNetError: Shape inconsistent, Provided = [3,2], inferred shape=(3,5)"
    log = f"{progress}\nTraceback (most recent call last):\n{frames}\n{error}\n"
    assert [answer.entry.name for answer in explain_log(log)] == ["shape-inconsistent"]


@pytest.mark.parametrize(
    "end",
    ["      RuntimeError: Cannot find the MXNet include path\n", "          RuntimeError: Cannot find the MXNet include path"],
)
def test_a_traceback_that_pip_indents_is_read(end):
    frames = "\n".join(f"{' ' * 6}{line}" for line in TRACEBACK.split("\n")[:-1])
    log = f"  error: subprocess-exited-with-error\n  [9 lines of output]\n{frames}\n{end}"
    assert explain_log(log)[0].entry.name == "horovod-not-built"


def test_a_message_of_cpp_in_two_lines_is_read_as_one():
    log = "terminate called after throwing an instance of 'std::system_error'\n  what():  Operation not permitted\n"
    assert explain_log(log)[0].entry.name == "threads-in-a-server"
    ranks = "".join(f"[1,0]<stderr>:{line}\n" for line in log.splitlines())
    assert explain_log(ranks)[0].entry.name == "threads-in-a-server"


def test_the_error_that_pytest_marks_comes_before_the_lines_of_code():
    log = 'numpy/__init__.py:284: in __getattr__\n    raise AttributeError("module {!r} has no attribute "\n'
    error = "AttributeError: module 'numpy' has no attribute 'bool'"
    assert explain_log(f"{log}E   {error}\nERROR conftest.py")[0].entry.name == "numpy-removed-names"


def test_errors_of_tracebacks_come_before_other_messages():
    log = "[10:00:00] src/base.cc:51: Upgrade advisory: this mxnet has been built against cuda library version 9020\n"
    log += TRACEBACK.format("IndexError: index 7 is out of bounds for axis 0 with size 2\n")
    assert [answer.entry.name for answer in explain_log(log)] == ["index-out-of-range", "upgrade-advisory"]


def test_an_error_that_says_little_is_read_with_the_line_that_raised_it():
    frames = '  File "recordio.py", line 313, in read_idx\n    pos = ctypes.c_size_t(self.idx[idx])\n               ^^^^^^^^\n'
    log = TRACEBACK.format(f"{frames}KeyError: 0\n")
    assert explain_log(log)[0].entry.name == "record-index"
    log = TRACEBACK.format('  File "a.py", line 1, in f\n    assert arg_shapes is not None\nAssertionError\n')
    assert [answer.entry.name for answer in explain_log(log)] == ["shapes-unknown"]


@pytest.mark.parametrize(
    "frame, error, name, without",
    [
        ("mxnet/onnx/mx2onnx/_op_translations.py", "NotImplementedError", "onnx-operator", "block-not-set-up"),
        ("mxnet/contrib/onnx/onnx2mx/import_onnx.py", "KeyError: 'Gemm_5'", "onnx-import", "key-not-found"),
        ("pydantic/main.py", "TypeError: f() missing 1 required positional argument: 'x'", "pydantic-version", "call-arguments"),
        ("multiprocessing/spawn.py", "EOFError: Ran out of input", "cannot-pickle", "invalid-params-file"),
    ],
)
def test_the_last_frame_of_a_traceback_names_the_library_of_an_error(frame, error, name, without):
    log = TRACEBACK.format(f'  File "/lib/python3.9/{frame}", line 5, in f\n    g()\n{error}\n')
    assert explain_log(log)[0].entry.name == first(log) == name
    other = TRACEBACK.format(f'  File "/lib/python3.9/{frame}", line 5, in f\n    g()\n  File "a.py", line 1, in g\n{error}\n')
    assert name not in {answer.entry.name for answer in explain_log(other)} and first(other) != name
    assert first(error) == without


FORWARD = (
    '  File "mxnet/module/module.py", line 606, in forward\n    shapes = tuple(i.shape for i in data_batch.data)\n{}\n',
    "mxnet/module/module.pyc in forward(self, data_batch)\n    605 \n--> 606     shapes = [data_batch.data]\n    607 \n{}\n",
    "[mxnet/module/module.py](https://host/#) in forward(self, data_batch)\n    605 \n--> 606  data_batch.data\n\n{}\n",
)


@pytest.mark.parametrize(
    "head", ["", "Traceback (most recent call last):\n", "AttributeError   Traceback (most recent call last)\n"]
)
@pytest.mark.parametrize("frame", FORWARD, ids=["python", "ipython", "colab"])
@pytest.mark.parametrize(
    "error, name, without",
    [
        ("AttributeError: 'NoneType' object has no attribute 'data'", "no-detection", "none-value"),
        ("AttributeError: 'NDArray' object has no attribute 'data'", "module-data-iter", "ndarray-method"),
    ],
)
def test_the_line_of_code_names_the_cause_in_every_form_of_a_traceback(head, frame, error, name, without):
    assert [answer.entry.name for answer in explain_log(head + frame.format(error))] == [name]
    assert first(error) == without


def test_a_traceback_of_which_the_head_is_missing_ends_with_its_error():
    log = (
        "INFO:root:Epoch[0]\n" + FORWARD[0].format("KeyError: 'x'") + "INFO:root:Epoch[1]\n" + FORWARD[0].format("KeyError: 'y'")
    )
    assert [answer.entry.name for answer in explain_log(log)] == ["key-not-found"]


def test_an_indented_traceback_is_read_to_its_error():
    log = TRACEBACK.format(FORWARD[0].format("AttributeError: 'NoneType' object has no attribute 'data'"))
    assert explain_log("\n".join(f"    {line}" for line in log.split("\n")))[0].entry.name == "no-detection"


def test_lines_below_an_error_without_a_traceback_belong_to_it():
    log = "RuntimeError: simple_bind error. Arguments:\ndata: (1, 3, 184, 200)\n[11:30:05] src/executor/graph_executor.cc:413: "
    log += (
        "InferShape pass cannot decide shapes for the following arguments. Please consider providing them as inputs:\nlabel: ()\n"
    )
    assert explain_log(log)[0].entry.name == "shapes-unknown"
    log = "MXNetError: Operator stack inferring shapes failed.\ninput shapes:\n{}\noutput shapes:\nNone\n"
    assert explain_log(log.format("None\nNone"))[0].entry.name == "scalar-or-empty-array"
    assert explain_log(log.format("[2,3]\n[2,4]"))[0].entry.name == "samples-of-different-sizes"


def test_a_traceback_without_its_first_line_is_one_message():
    log = '  File "lib/roi_data_layer/roidb.py", line 23, in f\n    roidb[i]["image"] = imdb.image_path_at(i)\n'
    assert explain_log(f"{log}IndexError: list index out of range\n")[0].entry.name == "region-cache"
    assert explain_log(log) == []


def test_a_pattern_that_goes_on_needs_another_word():
    assert explain_log("ModuleNotFoundError: No module named 'gluoncv'")[0].entry.name == "missing-package"
    assert explain_log("ModuleNotFoundError: No module named 'gluoncv.torch'")[0].entry.name == "version-mismatch"
    assert explain_log("ModuleNotFoundError: No module named 'mxnet'")[0].entry.name == "no-mxnet"


def test_a_bare_assertion_is_answered_by_its_condition_or_by_a_general_entry():
    for code, name in (("assert price > 0", "assertion"), ("assert os.path.isfile(_mask)", "file-not-found")):
        log = TRACEBACK.format(f'  File "a.py", line 1, in f\n    {code}\nAssertionError\n')
        assert explain_log(log)[0].entry.name == name
    assert explain_log(TRACEBACK.format("AssertionError\n")) == []


def test_an_error_that_a_library_raises_is_a_refused_value():
    frames = '  File "/lib/python3.9/site-packages/{}/transforms.py", line 5, in f\n    raise ValueError(text)\n'
    error = "ValueError: The scale 7 has no meaning here\n"
    assert explain_log(TRACEBACK.format(frames.format("gluoncv/data") + error))[0].entry.name == "argument-value"
    assert explain_log(TRACEBACK.format(frames.format("shop/data") + error)) == []


def test_a_warning_comes_after_an_error():
    log = "base_module.py:65: UserWarning: Data provided by label_shapes don't match names specified by label_names\n"
    log += "[06:22:55] src/storage/storage.cc:113: Compile with USE_CUDA=1 to enable GPU usage\n"
    assert [answer.entry.name for answer in explain_log(log)] == ["built-without-cuda", "module-inputs"]


def test_a_traceback_that_python_shows_in_quotes_is_read_as_one():
    printed = """{'time': 0.25,
  'traceback': 'Traceback (most recent call last):\\n'
               '  File "a.py", line 1, in <module>\\n'
               'ValueError: the batch cannot be '
               'evenly split into slices\\n',
  'train_map': -1}"""
    assert [answer.entry.name for answer in explain_log(printed)] == ["uneven-split"]


def test_the_traceback_of_a_worker_comes_before_its_consequence():
    frames = (
        '  File "/lib/python3.9/site-packages/gluonnlp/data/transforms.py", line 1089, in __call__\n    assert len(line) == 2\n'
    )
    log = f'multiprocessing.pool.RemoteTraceback:\n"""\nTraceback (most recent call last):\n{frames}AssertionError\n"""\n\n'
    log += "The above exception was the direct cause of the following exception:\n\n" + TRACEBACK.format("AssertionError\n")
    assert explain_log(log)[0].entry.name == "gluonnlp-vocabulary"


@pytest.mark.parametrize(
    "frame, found",
    [
        ("/lib/python3.9/site-packages/mxnet/gluon/contrib/estimator/estimator.py", "argument-value"),
        ("/src/incubator-mxnet/python/mxnet/gluon/contrib/estimator/estimator.py", "argument-value"),
        ("C:\\Anaconda3\\lib\\site-packages\\gluoncv\\data\\base.py", "argument-value"),
        ("/src/mxnet/train.py", None),
        ("/opt/envs/mxnet/lib/python3.9/site-packages/django/forms.py", None),
    ],
)
def test_what_a_library_for_mxnet_refuses_is_an_argument(frame, found):
    error = "ValueError: the order total is not acceptable"
    log = TRACEBACK.format(f'  File "{frame}", line 5, in f\n    raise ValueError(why)\n{error}\n')
    assert next((answer.entry.name for answer in explain_log(log)), None) == found
    tail = log.split("\n", log.count("\n") - 3)[-1]  # the header of the traceback is missing
    assert tail.startswith("  File") and next((answer.entry.name for answer in explain_log(tail)), None) == found


def test_a_traceback_of_a_notebook_is_read_to_its_last_frame():
    log = """ValueError                                Traceback (most recent call last)
<ipython-input-3-d2a6> in <module>()
----> 1 net(x)

~/lib/python3.6/site-packages/mxnet/gluon/contrib/estimator/estimator.py in f(self, x)
     71     def f(self, x):
---> 72         raise ValueError(why)
     73

ValueError: the order total is not acceptable
"""
    assert [answer.entry.name for answer in explain_log(log)] == ["argument-value"]


@pytest.mark.parametrize("end", ["", "\n\n        This probably means that you are not using fork"])
def test_a_message_may_be_broken_over_several_lines(end):
    text = (
        "RuntimeError:\n        An attempt has been made to start a new process before the\n        current process has finished"
    )
    text = f"{text} its bootstrapping phase.{end}\n"
    assert first(text) == explain_log(TRACEBACK.format(text))[0].entry.name == "main-guard"


def test_the_line_below_a_failed_launch_names_its_reason():
    text = "Launching horovodrun task function was not successful:\n"
    assert first(text) == "horovod-task"
    assert first(f"{text}bash: /opt/conda/bin/python3: No such file or directory") == "remote-python"


def test_a_message_inside_a_longer_one_is_not_its_cause():
    notice = "A fatal error occurred in asynchronous engine operation. If you do not know what caused this error, "
    notice += "you can try set environment variable MXNET_ENGINE_TYPE to NaiveEngine and run with debugger"
    assert first(notice) == "asynchronous-error"


def test_the_line_below_a_failed_cuda_call_names_its_reason():
    log = "MXNetError: src/common/cuda_utils.h:310: Check failed: e == cudaSuccess\n"
    log += "|| e == cudaErrorCudartUnloading: CUDA: invalid device ordinal\n"
    assert [answer.entry.name for answer in explain_log(log)] == ["invalid-device-ordinal", "cuda-call-failed"]


def test_a_chain_of_errors_is_answered_by_its_last_one_first():
    log = TRACEBACK.format("FileNotFoundError: [Errno 2] No such file or directory: 'a.rec'\n\n")
    log += "During handling of the above exception, another exception occurred:\n\n"
    log += TRACEBACK.format("ValueError: Pretrained model for resnet is not available.\n")
    assert [answer.entry.name for answer in explain_log(log)] == ["model-name-unknown", "file-not-found"]


def test_lines_that_belong_to_an_error_say_more_than_its_first_one():
    log = TRACEBACK.format("RuntimeError: simple_bind error. Arguments:\ndata: (1, 3, 640, 640)\n")
    log += "[16:14:50] src/storage/storage.cc:119: Compile with USE_CUDA=1 to enable GPU usage\n"
    log += "Stack trace:\n  [bt] (0) libmxnet.so\n"
    assert explain_log(log)[0].entry.name == "built-without-cuda"


def test_a_consequence_comes_after_its_cause():
    log = "[1,0]<stderr>:Horovod has been shut down. This was caused by an exception on one of the ranks\n"
    log += "\n".join(
        f"[1,1]<stderr>:{line}" for line in TRACEBACK.format("MemoryError: Unable to allocate 3 GiB for an array").split("\n")
    )
    assert [answer.entry.name for answer in explain_log(log)] == ["host-out-of-memory", "horovod-shut-down"]


def test_what_a_log_reports_first_is_answered_first():
    log = "ssh: Could not resolve hostname node1\nOSError: Too many open files\nssh: Could not resolve hostname node2\n"
    assert [answer.entry.name for answer in explain_log(log)] == ["ssh", "too-many-open-files"]


def test_the_log_of_a_job_of_several_processes():
    lines = TRACEBACK.format("OSError: [Errno 24] Too many open files").split("\n")
    log = "\n".join(f"\x1b[32m[{rank}] \x1b[0m{line}" for line in lines for rank in range(3))
    assert [answer.entry.name for answer in explain_log(log)] == ["too-many-open-files"]


def test_at_most_three_entries_answer_a_log():
    messages = ["Too many open files", "Address already in use", "Segmentation fault: 11", "No space left on device", "Bus error"]
    assert len(explain_log("\n".join(f"OSError: {message}" for message in messages))) == 3
    assert explain_log("INFO:root:Epoch[0] Batch [20] Speed: 33.7 samples/sec\n" * 1000) == []


ITERATION = TRACEBACK.format(FORWARD[0].format("AttributeError: 'NoneType' object has no attribute 'data'"))
AT_EXIT = """Exception ignored in: <object repr() failed>
Traceback (most recent call last):
  File "/usr/lib/python3.6/site-packages/mxnet/_ctypes/ndarray.py", line 51, in __del__
AttributeError: 'NoneType' object has no attribute 'MXNDArrayFree'
"""


@pytest.mark.parametrize("before", [ITERATION, "Too many open files\n", "OSError: [Errno 24] Too many open files\n"])
@pytest.mark.parametrize(
    "after",
    [
        AT_EXIT,
        AT_EXIT.replace("Exception ignored in: <object repr() failed>", "Error in atexit._run_exitfuncs:"),
        "terminate called without an active exception\nAborted (core dumped)\n",
        "UserWarning: semaphore_tracker: There appear to be 2 leaked semaphores to clean up at shutdown\n",
    ],
    ids=["del", "atexit", "terminate", "semaphores"],
)
def test_what_python_prints_while_it_ends_comes_after_an_error(before, after):
    assert explain_log(before + after)[0].entry.name == explain_log(before)[0].entry.name


def test_an_error_at_exit_alone_is_one():
    assert explain_log(AT_EXIT)[0].entry.name == "error-at-exit"


@pytest.mark.parametrize(
    "notice", ["src/base.cc:51: Upgrade advisory: this mxnet has been built against cuDNN lib version 7501\n"]
)
def test_a_notice_comes_after_an_error_that_follows_it(notice):
    assert [answer.entry.name for answer in explain_log(f"{notice}Too many open files\n")][0] == "too-many-open-files"
    assert explain_log(notice)[0].entry.name == "upgrade-advisory"


@pytest.mark.parametrize(
    "prefix",
    [
        "> ",
        "> > ",
        "    ",
        "[1,0]<stderr>:",
        "2: ",
        "worker-{}: ",
        "2020-07-27T10:01:02.{}Z ",
        "W-{}-model a.b.Worker - ",
        "#033[34m",
    ],
)
@pytest.mark.parametrize("frame", FORWARD, ids=["python", "ipython", "colab"])
@pytest.mark.parametrize("head", ["", "AttributeError                            "])
def test_what_stands_before_each_line_of_a_traceback_is_left_out(prefix, frame, head):
    log = frame.format("AttributeError: 'NoneType' object has no attribute 'data'\n\n" + AT_EXIT)
    lines = f"Epoch 1\n{head}Traceback (most recent call last):\n{log}".split("\n")
    log = "\n".join(prefix.format(100 + number) + line for number, line in enumerate(lines))
    assert explain_log(log)[0].entry.name == "no-detection"


def test_a_traceback_without_indentation_is_read():
    assert explain_log("\n".join(line.strip() for line in ITERATION.split("\n")))[0].entry.name == "no-detection"


@pytest.mark.parametrize("width", [70, 80])
def test_lines_that_a_terminal_broke_are_joined(width):
    log = TRACEBACK.format("MXNetError: src/engine/engine.cc:1: " + "x" * 150 + " 'NoneType' object has no attribute 'data'\n")
    log = FORWARD[0].format(log.split("\n")[-2])
    broken = "\n".join(line[i : i + width] for line in log.split("\n") for i in range(0, len(line) or 1, width))
    assert explain_log(broken)[0].entry.name == explain_log(log)[0].entry.name == "no-detection"


@pytest.mark.parametrize(
    "frames",
    [
        '  File "<string>", line 55, in take\n  File "/src/python/mxnet/_ctypes/ndarray.py", line 92, in _imperative_invoke\n',
        '  File "/lib/python3.9/site-packages/mxnet/base.py", line 253, in check_call\n    raise MXNetError(text)\n',
        '  File "/lib/python3.9/site-packages/numpy/core/fromnumeric.py", line 90, in f\n    return ufunc.reduce(obj)\n',
        '  File "/usr/lib/python3.9/json/decoder.py", line 357, in raw_decode\n    obj, end = self.scan_once(s, idx)\n',
        '  File "C:\\Python39\\lib\\json\\decoder.py", line 357, in raw_decode\n',
    ],
    ids=["operator", "check_call", "numpy", "python", "windows"],
)
def test_frames_of_python_and_of_operators_do_not_hide_the_one_that_tells(frames):
    telling = '  File "/lib/python3.9/site-packages/gluonts/transform/split.py", line 5, in f\n    entry[name]\n'
    log = TRACEBACK.format(telling + frames + "KeyError: 'target'\n")
    assert explain_log(log)[0].entry.name == "gluonts-features" != explain_log(log.replace("gluonts", "shop"))[0].entry.name


def test_a_line_below_an_error_does_not_hide_it():
    log = TRACEBACK.format("ValueError: the order of the input tensors is not acceptable: expected a batch of NDArrays\n")
    name = explain_log(log)[0].entry.name
    log += "Primary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, the job has been "
    log += "aborted.\n"
    assert [answer.entry.name for answer in explain_log(log)] == [name, "horovod-shut-down"]


@pytest.mark.parametrize("end", ["terminate called without an active exception", "Aborted (core dumped)", AT_EXIT])
def test_the_end_of_a_program_says_more_than_a_notice(end):
    notice = "src/nnvm/legacy_json_util.cc:190: Loading symbol saved by previous version v0.11.0. Attempting to upgrade...\n"
    assert explain_log(notice + end)[0].entry.name == explain_log(end)[0].entry.name != "symbol-of-another-version"
