"""The doctor: what it concludes from values, and what the command prints and when it exits with 1."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import mxnet as mx
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.doctor import examine, operations, probe, report
from gluon_mgpu.doctor.findings import Examination
from gluon_mgpu.doctor.gpu_checks import check_driver, check_gpus
from gluon_mgpu.doctor.machine_checks import Packages, check_packages, inspect_packages
from gluon_mgpu.doctor.operation_checks import check_operations
from gluon_mgpu.doctor.probe import check_openblas, try_gradient
from gluon_mgpu.doctor.settings import Setting
from gluon_mgpu.runtime import environment
from gluon_mgpu.runtime.nvidia.nvml import Driver, Gpu, GpuProcess

from .fake_nvml import FakeGpu, install, v100s

ROOT = Path(__file__).parent.parent
GIB = 2**30
A100 = Gpu(1, "GPU-8", "NVIDIA A100", "00000000:47:00.0", 40 * GIB, GIB, 39 * GIB, 5, 40, 60.0, (), (8, 0), ())
MIG = replace(A100, mig_enabled=True)
NO_FAULT = dict.fromkeys(("libraries", "devices", "trained", "settings", "thread_pools", "problems"), ())
NO_FAULT.update(version="1.9.1", features=["CUDA"])


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """No NVIDIA driver and no variable that hides GPUs, whatever the machine has."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return install(monkeypatch, [], error="LibraryNotFound")


def driver(*gpus, cuda="12.2"):
    return Driver("535.104.05", cuda, gpus)


def one(findings, *words):
    """The only finding, which holds these words, and says what to do."""
    (finding,) = findings
    for word in words:
        assert word in finding.what + finding.to_do, finding
    assert finding.what and finding.to_do.endswith(".")
    return finding


def doctor(*arguments, exit_code=0):
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


# GPUs and the driver


def test_a_driver_matters_only_where_one_is_needed(monkeypatch):
    why = "nvml: got no driver; expected a working driver. Install it."
    signs = ["/no/such/file"]
    monkeypatch.setattr("gluon_mgpu.doctor.gpu_checks._SIGNS", signs)
    assert check_driver(None, why, has_cuda=False) == []
    one(check_driver(None, why, has_cuda=True), "got no driver", "Expected a working driver. Install it.")
    signs[:] = ["/proc"]
    one(check_driver(None, "it hangs", has_cuda=False), "it hangs", "nvidia-smi")


def test_an_old_driver_does_not_run_cuda_11():
    one(check_driver(driver(cuda="10.2"), "", has_cuda=True), "CUDA up to 10.2", "450.80.02")
    assert check_driver(driver(cuda="10.2"), "", has_cuda=False) == check_driver(driver(cuda=""), "", has_cuda=True) == []


def test_what_is_wrong_with_a_gpu_is_reported():
    one(check_gpus(driver(replace(A100, trouble="GPU is lost"))), "GPU 1, NVIDIA A100, has failed: GPU is lost.")
    one(check_gpus(driver(MIG)), "at most one of its parts", "-i 1 -mig 0")
    hot = replace(A100, throttle_reasons=("temperature", "power limit"))
    one(check_gpus(driver(hot)), "is slowed down: temperature.")
    assert check_gpus(driver(replace(A100, throttle_reasons=("power limit",)))) == []


def test_a_gpu_that_others_use_is_reported():
    full = replace(A100, used_bytes=30 * GIB)
    busy = replace(full, processes=(GpuProcess(77, "python", 29 * GIB), GpuProcess(78, "", None)))
    one(check_gpus(driver(busy)), "30.0 GiB of 40.0 GiB in use", "process 77 (python), process 78 (name hidden)")
    one(check_gpus(driver(full)), "processes that are hidden here")


def test_gpus_of_two_kinds_may_have_other_numbers_in_cuda(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    one(check_gpus(driver(replace(A100, index=0), replace(A100, name="Tesla V100", uuid="GPU-7"))), "PCI_BUS_ID")


# Packages and settings


def test_two_wheels_do_not_stop_training():
    two = Packages({"numpy": "1.26.4"}, {}, {}, ("mxnet", "mxnet-cu112"))
    assert not one(check_packages(two), "mxnet and mxnet-cu112", "pip uninstall mxnet mxnet-cu112").stops_training


@pytest.mark.parametrize("numpy, said", [("2.5.5", True), ("1.26.4", False)])
def test_what_pip_says_of_numpy_2_is_explained(numpy, said):
    packages = Packages({"numpy": numpy, "mxnet": "1.9.1 (mxnet)"}, {}, {}, ("mxnet",))
    assert ("numpy<2" in dict(replace(examine(), packages=packages).rows()).get("pip check", "")) == said


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that puts a package's metadata before what is installed."""

    def put(name, *lines):
        (tmp_path / f"{name}-9.9.dist-info").mkdir()
        (tmp_path / f"{name}-9.9.dist-info" / "METADATA").write_text("\n".join([f"Name: {name}", "Version: 9.9", *lines]))
        monkeypatch.syspath_prepend(str(tmp_path))

    return put


def test_the_versions_are_those_that_are_imported(installed):
    installed("numpy")
    assert inspect_packages().versions["numpy"] == metadata.version("numpy") == "9.9"


@pytest.mark.parametrize("line", ['psutil>=5; extra == "monitor"', "psutil >=5 ; (os_name == 'posix') and extra == 'monitor'"])
def test_the_packages_of_an_extra_are_named_whatever_wrote_the_metadata(installed, line):
    installed("gluon_mgpu", f"Requires-Dist: {line}", 'Requires-Dist: ray; extra == "ray"')
    assert environment.install("monitor") == "pip install 'psutil>=5'"


def threads_of(*counts):
    return [Setting(f"threads of cpu({i})", str(count), "environment", "") for i, count in enumerate(counts)]


WORKERS = [((2, 2), "BLAS_OPEN", False, True), ((2,), "BLAS_OPEN", True, True), ((2,), "BLAS_OPEN", False, False)]
WORKERS += [((1, 2), "BLAS_OPEN", False, False), ((2, 2), "BLAS_MKL", False, False), ((), "BLAS_OPEN", True, False)]


@pytest.mark.parametrize("counts, feature, several_workers, hangs", WORKERS)
def test_two_workers_with_several_threads_can_hang(monkeypatch, counts, feature, several_workers, hangs):
    monkeypatch.delenv("MXNET_ENGINE_TYPE", raising=False)
    assert bool(check_openblas(threads_of(*counts), [feature], several_workers)) == hangs


# Devices


@pytest.mark.parametrize("fault", ["wrong", "error"])
def test_a_device_that_computes_wrong_or_fails_stops_training(monkeypatch, fault):
    assert try_gradient(mx.cpu(0)) == []
    array = mx.nd.array

    def failing(values, ctx):
        if fault == "error":
            raise mx.MXNetError("no kernel image")
        return array([2 * value for value in values], ctx=ctx)

    monkeypatch.setattr(mx.nd, "array", failing)
    problem = one(try_gradient(mx.cpu(0)), "cpu(0)", "no kernel image" if fault == "error" else "[4.0, -8.0]")
    assert problem.stops_training


def test_a_device_that_is_not_there_stops_training():
    found = probe.probe("gpu:99")
    assert [one for one in found["problems"] if one["stops_training"] and one["check"] == "devices"]
    assert found["trained"] == [] and found["version"] == mx.__version__


# The report


@pytest.fixture
def no_fault(monkeypatch):
    """A process finds no fault with MXNet."""
    monkeypatch.setattr(report, "run_probe", lambda spec: dict(NO_FAULT))


def test_a_check_that_fails_is_a_finding_and_the_others_are_made(no_fault, failing):
    exam = Examination()
    assert exam.run("disks", 7, lambda: 1 / 0) == 7
    one(exam.findings, "The check of disks failed: ZeroDivisionError")
    failing(report, "inspect_machine", "try_driver", error=ZeroDivisionError())
    found = examine()
    assert found.machine is None and found.packages.versions and not found.stops_training
    assert {one.check for one in found.findings} >= {"the machine", "GPUs"}


def test_gpus_are_rows(no_fault, no_driver):
    no_driver.error, memory = "", {"total_bytes": 40 * GIB, "used_bytes": GIB}
    a100 = FakeGpu("GPU-8", "NVIDIA A100", compute_capability=(8, 0), processes=[(77, "python", GIB)], **memory)
    no_driver.gpus = [*v100s(1), a100]
    short, long = dict(examine().rows()), dict(examine().rows(verbose=True))
    assert short["GPU 1"] == "NVIDIA A100, compute capability 8.0, 39.0 GiB of 40.0 GiB free"
    assert short["NVIDIA driver"] == "535.104.05, runs CUDA up to 12.2" and short["imported mxnet"] == "1.9.1, with CUDA"
    assert "on GPU 1" not in short and "process 77 (python)" in long["on GPU 1"]


# The command, in processes of its own


def test_a_healthy_machine_fits_one_screen():
    lines = doctor("--devices", "cpu*1").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert any(line.startswith("cpu(0)") and "its gradient was checked" in line for line in lines)
    assert len(doctor("--devices", "cpu*1", "--verbose").splitlines()) > len(lines)


def test_json_holds_everything():
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}  # the doctor's process sets it
    command = [sys.executable, "-m", "gluon_mgpu", "doctor", "--devices", "cpu*2", "--json"]
    found = json.loads(subprocess.run(command, env=environ, stdout=subprocess.PIPE, timeout=240, check=False).stdout)
    assert list(found) == ["machine", "packages", "driver", "why_no_driver", "mxnet", "problems"]
    assert found["mxnet"]["trained"] == ["cpu(0)", "cpu(1)"] and {"MKLDNN", "ONEDNN"}.intersection(found["mxnet"]["features"])
    sources = {one["name"]: one["source"] for one in found["mxnet"]["settings"]}
    assert sources["CUDA_DEVICE_ORDER"] == "gluon_mgpu" and sources["M_MMAP_MAX"] in ("gluon_mgpu", "environment")
    assert found["packages"]["versions"]["numpy"] == metadata.version("numpy")


def broken(tmp_path, code):
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text(code, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.mark.parametrize(
    "code, words",
    [("raise OSError('libcudnn.so.8: cannot open')", "libcudnn.so.8: cannot open"), ("import os; os._exit(139)", "status 139")],
)
def test_an_mxnet_that_cannot_be_used_is_a_problem(monkeypatch, tmp_path, code, words):
    monkeypatch.setenv("PYTHONPATH", broken(tmp_path, code)["PYTHONPATH"])
    found = report.run_probe("cpu")
    (problem,) = found["problems"]
    assert words in problem["what"] and problem["stops_training"] and found["devices"] == []


def test_the_doctor_runs_where_mxnet_cannot_be_imported(tmp_path):
    environment = broken(tmp_path, "raise OSError('libcudnn.so.8: cannot open shared object file')")
    command = [sys.executable, "-m", "gluon_mgpu", "doctor", "--json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=240)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert any("libcudnn.so.8" in one["what"] for one in found["problems"]) and found["packages"]["versions"]


# Operations of a GPU's libraries


def test_operations_run_in_a_process_of_their_own():
    assert check_operations("cpu(0)", ["cpu(1)"]) == []


def lines_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [(0, "Convolution", "it gave"), (1, "dot", "it gave"), (2, "BatchNorm", "it gave"), (3, "Dropout", "two masks of one seed")],
)
def test_each_operation_notices_a_wrong_result(monkeypatch, capsys, place, name, error):
    own, random = getattr(mx.nd, name), iter(range(100))

    def wrong(*args, **options):
        found = own(*args, **options)
        return found * mx.nd.array([next(random)], ctx=found.context).reshape((1,) * found.ndim)

    monkeypatch.setattr(mx.nd, name, wrong)
    operations.run_operations(mx.cpu(0), [])
    lines = lines_of(capsys)
    at = next(number for number, line in enumerate(lines) if line.get("begins") == operations.OPERATIONS[place].name)
    assert error in lines[at + 1]["error"]
    assert [line["library"] for line in lines if "begins" in line] == ["cuDNN", "cuBLAS", "cuDNN", "cuRAND", "NVRTC"]


def test_a_copy_that_arrives_changed_is_noticed(monkeypatch, capsys):
    own = mx.nd.NDArray.copyto

    def copyto(array, to):
        found = own(array, to)
        if found.size > 7:
            found[7] = found[7] + 1
        return found

    monkeypatch.setattr(mx.nd.NDArray, "copyto", copyto)
    operations.run_operations(mx.cpu(0), [mx.cpu(1)])
    assert lines_of(capsys)[-2:] == [
        {"begins": "a copy to cpu(1)", "library": "peer access"},
        {"error": "1 of 4194304 numbers arrived changed"},
    ]


def test_an_operation_that_raises_is_named(monkeypatch, capsys):
    def failing(*args, **options):
        raise mx.MXNetError("CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(mx.nd, "Convolution", failing)
    operations.run_operations(mx.cpu(0), [])
    assert lines_of(capsys)[1] == {"error": "CUDNN_STATUS_NOT_INITIALIZED"}


BEGINS = """echo '{"begins": "a hybridized block", "library": "NVRTC"}'"""
SCRIPTS = {
    "error": (f"""{BEGINS}; echo '{{"error": "NVRTC Compilation failed"}}'""", "(NVRTC): NVRTC Compilation failed."),
    "crash": (f"{BEGINS}; kill -SEGV $$", "(NVRTC): it ended the process with status -11."),
    "hang": (f"{BEGINS}; exec sleep 60", "(NVRTC): it did not end within 2 s."),
    "import": ("echo no; exit 1", "import mxnet failed (CUDA): it ended the process with status 1."),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_device_that_fails_hangs_or_crashes_is_a_problem(monkeypatch, tmp_path, kind):
    script, expected = SCRIPTS[kind]
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert one(check_operations("gpu(0)", [], limit_s=2), "gpu(0): ", expected).stops_training


def test_every_gpu_runs_its_operations_and_copies_to_the_others(monkeypatch):
    asked = []
    found = {**NO_FAULT, "trained": ["gpu(0)", "gpu(1)"]}
    monkeypatch.setattr(report, "run_probe", lambda spec: dict(found))
    monkeypatch.setattr(report, "check_operations", lambda *arguments: asked.append(arguments) or [])
    assert "problems" in json.loads(doctor("--json", "--devices", "gpu"))
    assert asked == [("gpu(0)", ["gpu(1)"]), ("gpu(1)", ["gpu(0)"])]


def test_drivers_that_do_not_translate_the_code_of_nvrtc():
    """Hybridized networks fuse operations on GPUs; NVRTC of CUDA 11.8 writes PTX that drivers before 520.61 refuse."""
    old = replace(driver(A100, cuda="11.4"), version="470.82.01")
    one(check_driver(old, "", has_cuda=True, nvrtc="11.8.89"), "NVRTC 11.8.89", "520.61", "MXNET_USE_FUSION=0")
    for cuda, nvrtc in (("11.4", ""), ("11.8", "11.8.89"), ("12.2", "11.8.89")):
        assert check_driver(driver(A100, cuda=cuda), "", has_cuda=True, nvrtc=nvrtc) == []
    assert check_driver(old, "", has_cuda=False, nvrtc="11.8.89") == []


def test_newer_drivers_do_not_see_older_gpus():
    new = replace(driver(cuda="13.1"), version="590.44.01")
    one(check_driver(new, "", has_cuda=True), "590.44.01 lists no GPU", "branch 580")
    assert check_driver(replace(new, gpus=(A100,)), "", has_cuda=True) == []
