"""The command gluon-mgpu doctor: what it tells, and when it exits with 1."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.devices.describe import DeviceInfo
from gluon_mgpu.runtime import environment, threads

from .fake_nvml import h200, install, v100s

ROOT = Path(__file__).parent.parent

KEYS = ["here", "features", "gpu_code", "driver", "gpus", "links", "libraries", "devices", "settings", "thread_pools"]
KEYS += ["places", "stores", "horovod", "problems"]
TITLES = ["machine and packages", "devices", "NVIDIA driver", "CUDA libraries", "runtime settings", "why"]
TITLES += ["thread pools in this process", "storage", "gradient stores", "problems"]
CPU = DeviceInfo("cpu(0)", "A processor, 8 cores", 3 * 2**30, True, "")


def doctor(*arguments, exit_code=0):
    """What the command prints in this process."""
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def fresh(*arguments, **environment):
    """What the command reports, as JSON, in a process of its own that starts without the settings; and its exit code."""
    decides = ("OMP_", "MXNET_", "MALLOC_", "GLIBC_TUNABLES", "GLUON_MGPU_RUNTIME")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(decides)}
    done = subprocess.run(
        [sys.executable, "-m", "gluon_mgpu", "doctor", "--json", *arguments],
        env={**clean, "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        timeout=240,
    )
    assert done.stderr == b""
    return json.loads(done.stdout), done.returncode


def values(report):
    return {setting["name"]: (setting["value"], setting["source"]) for setting in report["settings"]}


def problems(report):
    """What is wrong, but for what depends on the machine that the tests run on."""
    return [one for one in report["problems"] if one["check"] not in ("disk space", "shared memory")]


def squeezed(output):
    """The words of a table, without its frame; a cell that was folded is one string again."""
    return " ".join(output.replace("│", " ").split())


@pytest.fixture
def there(monkeypatch):
    """A function that says which devices there are."""
    return lambda *devices: monkeypatch.setattr("gluon_mgpu.devices.describe.describe_devices", lambda: list(devices))


def test_json_is_one_object_that_tells_everything():
    report, exit_code = fresh("--devices", "cpu:2")
    assert exit_code == 0
    assert list(report) == KEYS
    assert problems(report) == []
    here = report["here"]
    assert (here["Python"], here["numpy"], here["mxnet"]) == (platform.python_version(), np.__version__, mx.__version__)
    assert here["gluon_mgpu"] == mgpu.__version__
    assert "OPENMP" in here["mxnet was built with"]
    assert report["devices"][0]["name"] == "cpu(0)"
    assert values(report)["threads of cpu(0)"] == values(report)["threads of cpu(1)"] == ("1", "gluon_mgpu")
    assert all(setting["reason"].endswith(".") for setting in report["settings"])


@pytest.mark.exhaustive
def test_one_context_is_told_its_cores():
    report, _ = fresh("--devices", "cpu:1")
    assert values(report)["threads of cpu(0)"] == (str(environment.num_cores()), "gluon_mgpu")
    assert "threads of cpu(1)" not in values(report)


def test_the_environment_is_named_for_each_setting(monkeypatch):
    for name, value in {"OMP_NUM_THREADS": "3", "MXNET_CPU_TEMP_COPY": "9", "MALLOC_TOP_PAD_": "65536"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "_set_here", set())
    monkeypatch.setattr(threads, "_new", set())  # the threads of no context were set
    found = values(json.loads(doctor("--devices", "cpu:1", "--json")))
    assert found["threads of cpu(0)"][1] == found["M_MMAP_MAX"][1] == "environment"
    assert found["MXNET_CPU_TEMP_COPY"] == ("9", "environment")


@pytest.mark.exhaustive
def test_the_environment_is_named_where_it_stands():
    report, _ = fresh("--devices", "cpu:1", OMP_NUM_THREADS="3", MXNET_CPU_TEMP_COPY="9", MALLOC_TOP_PAD_="65536")
    found = values(report)
    assert found["threads of cpu(0)"] == ("3", "environment")
    assert found["MXNET_CPU_TEMP_COPY"] == ("9", "environment")
    assert found["M_MMAP_MAX"][1] == "environment"


@pytest.fixture
def off(monkeypatch):
    """This process as if it had started with GLUON_MGPU_RUNTIME=off."""
    monkeypatch.setenv("GLUON_MGPU_RUNTIME", "off")
    monkeypatch.delenv("MXNET_CPU_TEMP_COPY", raising=False)
    monkeypatch.setattr(environment, "_set_here", set())


def test_off_is_told_for_each_setting(off):
    found = values(json.loads(doctor("--devices", "cpu:2", "--json")))
    names = ["threads of cpu(0)", "threads of cpu(1)", "M_MMAP_MAX", "M_TRIM_THRESHOLD", "MXNET_CPU_TEMP_COPY"]
    assert [found[name][1] for name in names] == ["off"] * 5
    assert found["MXNET_CPU_TEMP_COPY"][0] == "4"


@pytest.mark.exhaustive
def test_off_is_told():
    report, exit_code = fresh("--devices", "cpu:2", GLUON_MGPU_RUNTIME="off", OMP_NUM_THREADS="1")
    assert exit_code == 0
    found = values(report)
    off = ["threads of cpu(0)", "threads of cpu(1)", "M_MMAP_MAX", "M_TRIM_THRESHOLD", "MXNET_CPU_TEMP_COPY"]
    assert [found[name][1] for name in off] == ["off"] * 5
    assert found["MXNET_CPU_TEMP_COPY"][0] == "4"


def test_a_switch_that_is_not_off_is_told(monkeypatch):
    monkeypatch.setenv("GLUON_MGPU_RUNTIME", "no")
    (problem,) = problems(json.loads(doctor("--devices", "cpu:1", "--json")))
    assert problem["what"] == "GLUON_MGPU_RUNTIME=no has no effect."
    assert not problem["stops_training"]


def test_tables_hold_the_same():
    output = doctor("--devices", "cpu:2")
    for title in TITLES:
        assert f"\n{title}\n" in f"\n{output}"
    for name in ("threads of cpu(0)", "threads of cpu(1)", "M_TRIM_THRESHOLD", "MXNET_CPU_PARALLEL_RAND_COPY"):
        assert output.count(f"│ {name} ") == 2  # its value, and why


def test_devices_that_are_not_there_stop_training():
    (problem,) = problems(json.loads(doctor("--devices", "cpu:0,cpu:0", "--json", exit_code=1)))
    assert problem["stops_training"]
    assert problem["what"] == "use_devices: got cpu(0) twice in [cpu(0), cpu(0)]"
    assert problem["to_do"] == "Expected different devices. Name each once."
    wrong = doctor("--devices", "tpu", exit_code=1).split("problems")[1]
    assert "use_devices: got 'tpu'" in squeezed(wrong)
    assert "│ yes " in wrong


def test_a_gpu_that_cannot_be_used_is_told_but_does_not_stop_the_cpu(there):
    there(CPU, DeviceInfo("-", "NVIDIA H100", 80 * 2**30, False, "Run pip install 'gluon_mgpu[cu112]'."))
    (problem,) = problems(json.loads(doctor("--devices", "cpu:1", "--json")))
    assert problem == {
        "check": "devices",
        "what": "- NVIDIA H100 cannot be used.",
        "to_do": "Run pip install 'gluon_mgpu[cu112]'.",
        "stops_training": False,
    }
    output = doctor("--devices", "cpu:1")
    assert "'gluon_mgpu[cu112]'" in output  # rich would take the brackets for markup
    assert "A processor, 8 cores" in output


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_device_that_computes_wrong_or_fails_stops_training(monkeypatch, fault):
    array = mx.nd.array

    def broken(values, ctx=None):
        if fault == "raises":
            raise mx.MXNetError("Traceback:\n  somewhere\nMXNetError: no kernel image is available")
        return array([7.0 * value for value in values], ctx=ctx)

    monkeypatch.setattr(mx.nd, "array", broken)
    (problem,) = problems(json.loads(doctor("--devices", "cpu:1", "--json", exit_code=1)))
    expected = {
        "wrong": "cpu(0) computed [14.0, -28.0], not [2.0, -4.0].",
        "raises": "cpu(0) failed: MXNetError: no kernel image is available",
    }
    assert problem["what"] == expected[fault]
    assert problem["stops_training"] is True


def test_two_wheels_of_mxnet_are_told(monkeypatch):
    class Package:
        def __init__(self, name):
            self.metadata = {"Name": name}

        def locate_file(self, path):
            return Path(mx.__file__).parent.parent / path

    monkeypatch.setattr(metadata, "distributions", lambda: [Package(n) for n in ("mxnet", "numpy", "mxnet-cu112", "mxnet-tools")])
    (problem,) = problems(json.loads(doctor("--devices", "cpu:1", "--json")))
    assert problem["what"] == "mxnet and mxnet-cu112 are installed and overwrite each other."
    assert problem["to_do"].startswith("Run pip uninstall mxnet mxnet-cu112,")


def test_settings_that_came_too_late_are_told(monkeypatch):
    monkeypatch.setattr(environment, "_too_late", {"MXNET_CPU_TEMP_COPY"})
    report = json.loads(doctor("--devices", "cpu:1", "--json"))
    assert values(report)["MXNET_CPU_TEMP_COPY"] == ("4", "MXNet's default")
    (problem,) = problems(report)
    assert problem["what"] == "MXNET_CPU_TEMP_COPY could not be set."
    assert "import gluon_mgpu above import mxnet" in problem["to_do"]


def test_optional_packages_that_are_missing_name_their_extra(monkeypatch):
    version = metadata.version

    def without(name):
        if name in ("d2l", "scipy"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    here = json.loads(doctor("--devices", "cpu:1", "--json"))["here"]
    assert here["scipy"] == "not installed: pip install 'gluon_mgpu[train]'"
    assert here["d2l"] == "not installed: pip install 'gluon_mgpu[d2l]'"


def test_pools_are_those_that_threadpoolctl_finds(monkeypatch):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    pools = json.loads(doctor("--devices", "cpu:1", "--json"))["thread_pools"]
    expected = sorted((pool["internal_api"], pool["num_threads"]) for pool in threadpoolctl.threadpool_info())
    assert sorted((pool["kind"], pool["threads"]) for pool in pools) == expected != []


def test_without_threadpoolctl_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    assert json.loads(doctor("--devices", "cpu:1", "--json"))["thread_pools"] == []
    assert "'gluon_mgpu[doctor]'" in squeezed(doctor("--devices", "cpu:1"))


def test_it_is_a_command_with_help_for_each_flag():
    output = CliRunner().invoke(main, ["doctor", "--help"]).output
    for parameter in main.commands["doctor"].params:
        assert isinstance(parameter, click.Option)
        assert all(flag in output for flag in parameter.opts)
        assert parameter.help


def test_an_h200_without_a_wheel_that_can_run_there(monkeypatch):
    install(monkeypatch, [h200(processes=[(42, "python", 2**30)])])
    report = json.loads(doctor("--devices", "auto", "--json"))
    (gpu,) = report["gpus"]
    assert (gpu["name"], gpu["compute_capability"], gpu["code"]) == ("NVIDIA H200", [9, 0], "none")
    assert report["driver"] == {"version": "535.104.05", "cuda_version": "12.2", "why_not": ""}
    (problem,) = problems(report)  # the list of devices does not say it again
    assert "9.0 (Hopper), for which no MXNet 1.9.1 wheel on PyPI holds code" in problem["what"]
    assert "nvcr.io/nvidia/mxnet:24.06-py3" in problem["to_do"]
    assert report["devices"][1]["reason"] == problem["what"]  # and not that another wheel would help
    output = squeezed(doctor())
    assert "0 - NVIDIA H200 9.0 none" in output
    assert "process 42 (python, 1.0 GiB)" in output


def test_gpus_that_are_linked(monkeypatch):
    install(monkeypatch, v100s(2))
    report = json.loads(doctor("--devices", "cpu:1", "--json"))
    assert [(link["a"], link["b"], link["kind"]) for link in report["links"]] == [(0, 1, "NVLink")]
    assert "\nlinks\n" in doctor("--devices", "cpu:1")


def test_no_driver_is_no_problem_for_a_build_for_cpus(monkeypatch):
    if mx.runtime.Features().is_enabled("CUDA"):
        pytest.skip("this is a wheel for GPUs")
    monkeypatch.setattr("gluon_mgpu.doctor.gpus._SIGNS", ())
    install(monkeypatch, error="LibraryNotFound")
    report = json.loads(doctor("--devices", "cpu:1", "--json"))
    assert "NVML Shared Library Not Found" in report["driver"]["why_not"]
    assert problems(report) == report["gpus"] == report["libraries"] == []


def test_a_folder_for_checkpoints_that_cannot_be_made_stops_training(tmp_path):
    (tmp_path / "file").touch()
    report = json.loads(doctor("--devices", "cpu:1", "--output", str(tmp_path / "file" / "runs"), "--json", exit_code=1))
    assert any("is not a folder" in problem["what"] and problem["stops_training"] for problem in report["problems"])


def test_lines_fit_80_columns_in_a_pipe(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, doctor("--devices", "cpu:1").splitlines())) <= 80


def without_mxnet(folder, *arguments):
    """The command in a process whose MXNet cannot find a library."""
    (folder / "mxnet").mkdir()
    (folder / "mxnet" / "__init__.py").write_text(
        "raise OSError('libcudnn.so.8: cannot open shared object file')", encoding="utf-8"
    )
    return subprocess.run(
        [sys.executable, "-m", "gluon_mgpu_startup.command", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        cwd=folder,
        capture_output=True,
        timeout=240,
    )


def test_it_runs_where_mxnet_cannot_be_imported(tmp_path):
    done = without_mxnet(tmp_path, "doctor", "--json")
    assert (done.returncode, done.stderr) == (1, b"")
    report = json.loads(done.stdout)
    assert list(report) == KEYS
    (problem,) = [one for one in report["problems"] if one["stops_training"]]
    assert problem["check"] == "MXNet"
    assert "got libcudnn.so.8: cannot open" in problem["what"]
    assert report["devices"] == report["settings"] == []
    assert report["places"]


def test_other_commands_say_so_where_mxnet_cannot_be_imported(tmp_path):
    done = without_mxnet(tmp_path, "devices")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"libcudnn.so.8" in done.stderr and b"gluon-mgpu doctor" in done.stderr
    assert b"Traceback" not in done.stderr
