"""What the doctor concludes from what was recorded: no GPU, driver, full disk or second wheel is needed here."""

import os
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from gluon_mgpu import doctor
from gluon_mgpu.devices.describe import DeviceInfo
from gluon_mgpu.doctor import gpus, machine, report, storage, stores
from gluon_mgpu.doctor.build import Build, check_build
from gluon_mgpu.doctor.findings import Examination, Problem, describe_error
from gluon_mgpu.doctor.gpus import Reading, barred, check_driver, check_gpus, explains, names_in_mxnet
from gluon_mgpu.doctor.libraries import check_libraries
from gluon_mgpu.doctor.machine import Machine, Packages, check_packages
from gluon_mgpu.doctor.settings import Engine, check_openblas, check_settings
from gluon_mgpu.doctor.storage import StorageLocation, check_checkpoints, check_shared_memory, check_temporary
from gluon_mgpu.doctor.stores import Horovod, check_horovod, inspect_horovod, stores_of
from gluon_mgpu.doctor.training import with_reasons
from gluon_mgpu.runtime import environment, gpu_builds
from gluon_mgpu.runtime.cuda_libraries import CudaLibrary
from gluon_mgpu.runtime.environment import Setting
from gluon_mgpu.runtime.fat_binary import FatBinaries
from gluon_mgpu.runtime.nvidia.nvml import Driver, Gpu, GpuProcess, Link, MigDevice

GIB = 2**30
CU112 = FatBinaries(((5, 0), (6, 0), (7, 0), (8, 0), (8, 6)), (), 198)
GPU_BUILD = Build("mxnet/libmxnet.so", "1.9.1", "", "", ("BLAS_OPEN", "CUDA", "CUDNN", "DIST_KVSTORE", "NCCL"), CU112)
CPU_BUILD = Build("mxnet/libmxnet.so", "1.9.1", "", "", ("BLAS_OPEN", "DIST_KVSTORE"), FatBinaries((), (), 0))
BROKEN = Build("mxnet/libmxnet.so", "", "import mxnet: got no libnccl.so.2", "Need it.", (), CU112)

# Readings of NVML, as `nvml.read_driver` returns them.
H200 = Gpu(0, "GPU-9", "NVIDIA H200", "00000000:19:00.0", 141 * GIB, GIB, 140 * GIB, 0, 31, 76.0, 700.0, (), (9, 0), ())
A100 = Gpu(1, "GPU-8", "NVIDIA A100-SXM4-40GB", "00000000:47:00.0", 40 * GIB, GIB, 39 * GIB, 5, 40, 60.0, 400.0, (), (8, 0), ())
K80 = Gpu(2, "GPU-3", "Tesla K80", "00000000:50:00.0", 11 * GIB, 0, 11 * GIB, 0, 30, None, None, (), (3, 7), ())
MIG = replace(
    A100,
    mig_enabled=True,
    mig=(MigDevice("MIG-1", "A100 MIG 1g.5gb", 5 * GIB, 5 * GIB), MigDevice("MIG-2", "A100 MIG 1g.5gb", 5 * GIB, 5 * GIB)),
)


def reading(*found, **environ):
    return Reading(Driver("535.104.05", "12.2", found, ()), "", True, environ, pid=1)


def one(findings, *words):
    """The only finding; it holds these words, and tells what to do."""
    (finding,) = findings
    for word in words:
        assert word in finding.what + finding.to_do, finding
    assert finding.what[-1] in ".:!" or finding.check == "MXNet"
    assert finding.to_do.endswith(".")
    return finding


# GPUs


@pytest.mark.parametrize("build", [GPU_BUILD, CPU_BUILD], ids=["gpu-build", "cpu-build"])
def test_an_h200_is_told_that_no_wheel_can_run_there(build):
    found = one(check_gpus(reading(H200), build), "NVIDIA H200", "9.0 (Hopper)", "no MXNet 1.9.1 wheel on PyPI", "--devices cpu")
    assert "cu112" not in found.to_do  # which would not help
    assert explains(reading(H200), build)


def test_a_device_that_no_wheel_can_use_is_not_promised_one():
    devices = [DeviceInfo("-", "NVIDIA H200", 0, False, "Run pip install 'gluon_mgpu[cu112]'.", index=0)]
    devices += [DeviceInfo("cpu(0)", "A processor", 0, True, ""), DeviceInfo("-", "A GPU", 0, False, "Hidden.")]
    known = barred(reading(H200), CPU_BUILD)
    assert "no MXNet 1.9.1 wheel on PyPI holds code" in known[0]
    assert [one.reason for one in with_reasons(devices, known)] == [known[0], "", "Hidden."]
    assert barred(reading(A100), GPU_BUILD) == {}


def test_the_h200_is_told_what_the_library_holds():
    assert "compute capability 5.0, 6.0, 7.0, 8.0, 8.6; no PTX" in check_gpus(reading(H200), GPU_BUILD)[0].what


def test_ptx_would_let_an_h200_run():
    with_ptx = replace(GPU_BUILD, code=FatBinaries(((8, 0),), ((8, 0),), 1))
    assert check_gpus(reading(H200), with_ptx) == []
    assert gpus.code_for(H200, with_ptx) == "PTX 8.0"


def test_an_a100_with_the_gpu_build_is_fine():
    assert check_gpus(reading(A100), GPU_BUILD) == []
    assert not explains(reading(A100), GPU_BUILD)
    assert gpus.code_for(A100, GPU_BUILD) == "8.0"


def test_an_a100_with_the_cpu_wheel_names_the_wheel_for_gpus():
    one(check_gpus(reading(A100), CPU_BUILD), "build for CPUs", "cannot use GPU 1 (NVIDIA A100-SXM4-40GB)", "gluon_mgpu[cu112]")
    assert explains(reading(A100), CPU_BUILD)


def test_an_h200_beside_an_a100_is_told_apart():
    idle, newer = check_gpus(reading(replace(A100, index=1), replace(H200, index=0)), CPU_BUILD)
    assert "H200" not in idle.what
    assert "no MXNet 1.9.1 wheel" in newer.what
    assert not explains(reading(A100, H200), GPU_BUILD)  # that MXNet cannot run on the A100 must still be told


def test_an_older_wheel_than_the_gpu_names_the_newer():
    older = replace(GPU_BUILD, code=FatBinaries(((3, 0), (5, 0), (6, 0), (7, 0), (7, 5)), (), 198))  # as in mxnet-cu102
    one(check_gpus(reading(A100), older), "8.0", "3.0, 5.0, 6.0, 7.0, 7.5", "gluon_mgpu[cu112]")


def test_a_kepler_gpu_is_too_old():
    one(
        check_gpus(reading(K80), GPU_BUILD), "3.7 (Kepler), for which mxnet-cu112 holds no code", "starts at 5.0", "--devices cpu"
    )


def kind(name, capability, index=0):
    return replace(H200, index=index, name=name, compute_capability=capability)


def test_an_h100_gets_commands_that_it_can_run_and_hears_whether_its_driver_suffices():
    found = one(check_gpus(reading(kind("NVIDIA H100 80GB HBM3", (9, 0))), GPU_BUILD), gpu_builds.IMAGE, gpu_builds.RUN)
    assert "nvcr.io/nvidia/mxnet:24.06-py3" in found.to_do
    assert "Your driver 535.104.05 is new enough." in found.to_do
    assert "-DMXNET_CUDA_ARCH=9.0" in found.to_do and "CUDA 11.8" in found.to_do
    assert "github.com/smolix/mxnet/releases" in found.to_do and "MXNet 2.0" in found.to_do


def test_commands_are_printed_below_the_tables_where_no_column_breaks_them(healthy):
    two = reading(kind("NVIDIA H100", (9, 0)), kind("NVIDIA H200", (9, 0), 1), CUDA_DEVICE_ORDER="PCI_BUS_ID")
    findings = tuple(check_gpus(two, GPU_BUILD))
    assert len(findings) == 2
    found = replace(healthy, findings=findings)
    assert {row[1] for row in table(found, "problems")} == {"Get an MXNet for Hopper, in one of the three ways below."}
    (text,) = doctor.instructions(found)  # once
    assert {gpu_builds.IMAGE, gpu_builds.RUN} <= {line.strip() for line in text.splitlines()}
    assert doctor.instructions(replace(healthy, findings=(Problem("GPUs", "It is wrong.", "Fix it."),))) == []


def test_eight_h100_are_one_finding():
    eight = [kind("NVIDIA H100 80GB HBM3", (9, 0), index) for index in range(8)]
    one(check_gpus(reading(*eight), GPU_BUILD), "GPUs 0, 1, 2, 3, 4, 5, 6, 7, NVIDIA H100 80GB HBM3, have compute capability 9.0")
    assert list(barred(reading(*eight), GPU_BUILD)) == list(range(8))


@pytest.mark.parametrize("name, capability", [("NVIDIA B200", (10, 0)), ("NVIDIA GeForce RTX 5090", (12, 0))])
def test_blackwell_is_not_sent_to_the_container(name, capability):
    found = one(check_gpus(reading(kind(name, capability)), GPU_BUILD), "(Blackwell)", "smolix/mxnet", "ends with Hopper")
    assert "docker run" not in found.to_do
    assert "Your driver 535.104.05 is too old: upgrade it first." in found.to_do  # for the fork


@pytest.mark.parametrize("build", [GPU_BUILD, CPU_BUILD], ids=["gpu-build", "cpu-build"])
@pytest.mark.parametrize("name, capability", [("Tesla V100", (7, 0)), ("Tesla T4", (7, 5)), ("NVIDIA L4", (8, 9))])
def test_gpus_up_to_ada_need_only_the_wheel(name, capability, build):
    found = check_gpus(reading(kind(name, capability)), build)
    assert [finding.to_do for finding in found] == ([] if build is GPU_BUILD else [gpu_builds.advice(capability)])
    assert gpu_builds.advice(capability) == "Run pip uninstall mxnet, then pip install 'gluon_mgpu[cu112]'."


# Builds that are not from PyPI, as the container's


CONTAINER = FatBinaries(((6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)), ((9, 0),), 200)


@pytest.mark.parametrize(
    "version, library, wheels, code, sign",
    [
        ("1.9.1", "/site/mxnet/libmxnet.so", ("mxnet",), FatBinaries((), (), 0), ""),
        ("1.9.1", "/site/mxnet/libmxnet.so", ("mxnet-cu112",), CU112, ""),
        ("1.8.0.post0", "/site/mxnet/libmxnet.so", ("mxnet",), None, ""),
        ("2.0.0beta1", "/site/mxnet/libmxnet.so", ("mxnet",), FatBinaries((), (), 0), ""),
        ("", "/site/mxnet/libmxnet.so", ("mxnet-cu112",), CU112, ""),
        ("1.9.1", "", (), None, ""),
        ("1.9.1", "/site/mxnet/libmxnet.so", (), CU112, "pip lists no package mxnet"),
        ("1.9.1+cu124", "/site/mxnet/libmxnet.so", ("mxnet",), None, "its version, 1.9.1+cu124, has a suffix"),
        ("1.9.1.dev3", "/site/mxnet/libmxnet.so", ("mxnet",), None, "has a suffix"),
        ("1.9.1", "/opt/mxnet/lib/libmxnet.so", ("mxnet",), None, "/opt/mxnet/lib/libmxnet.so, is outside the package"),
        ("1.9.1", "/src/python/mxnet/libmxnet.so", ("mxnet",), None, "is not where pip installed mxnet"),
        ("1.9.1", "/site/mxnet/libmxnet.so", ("mxnet-cu112",), CONTAINER, "holds machine code for 9.0"),
        ("1.9.1", "/site/mxnet/libmxnet.so", ("mxnet",), CU112, "CPU wheel mxnet, but its library holds GPU code"),
    ],
)
def test_a_build_from_elsewhere_is_known_by_its_version_metadata_place_or_code(version, library, wheels, code, sign):
    found = gpu_builds.why_built_elsewhere(version, library, wheels, code=code, folders=["/site"])
    assert sign in found and bool(sign) == bool(found)


ELSEWHERE = replace(GPU_BUILD, code=CONTAINER, elsewhere="pip lists no package mxnet")


def test_an_h100_in_the_container_is_fine():
    assert check_gpus(reading(H200), ELSEWHERE) == []
    assert gpus.code_for(H200, ELSEWHERE) == "9.0"


def test_a_build_from_elsewhere_is_built_again_and_not_uninstalled_by_pip():
    without_ampere = replace(ELSEWHERE, code=FatBinaries(((9, 0),), (), 9))
    found = one(check_gpus(reading(A100), without_ampere), "8.0 (Ampere)", "-DMXNET_CUDA_ARCH=8.0", "another environment")
    assert "uninstall" not in found.to_do.lower()
    for_cpus = replace(ELSEWHERE, features=(), code=FatBinaries((), (), 0))
    assert "uninstall" not in one(check_gpus(reading(A100), for_cpus), "-DUSE_CUDA=ON").to_do.lower()
    one(check_gpus(reading(kind("NVIDIA B200", (10, 0))), replace(ELSEWHERE, code=CU112)), "-DMXNET_CUDA_ARCH=10.0", "smolix")


def test_missing_libraries_of_a_build_from_elsewhere_do_not_come_from_the_extra():
    missing = [library("libcuda.so.1", ""), library("libcudart.so.12", ""), library("libcudnn.so.9", "")]
    for found in check_libraries(missing, ELSEWHERE):
        assert "gluon_mgpu[" not in found.to_do and "container" in found.to_do


def test_the_report_says_where_mxnet_was_built(monkeypatch, healthy):
    assert healthy.here()["mxnet was built"].startswith("for PyPI: mxnet")
    monkeypatch.setattr(report, "inspect_packages", lambda: Packages({}, ()))
    assert doctor.examine("cpu:1").here()["mxnet was built"] == "elsewhere: pip lists no package mxnet"


@pytest.mark.parametrize(
    "driver, verdict",
    [
        ("535.104.05", "new enough"),
        ("535.54.03", "too old"),
        ("525.85.12", "new enough"),
        ("530.30.02", "too old"),
        ("545.23.08", "new enough"),
        ("570.86.15", "new enough"),
        ("", "470.57)."),
    ],
)
def test_the_driver_that_the_container_needs(driver, verdict):
    assert verdict in gpu_builds.advice((9, 0), driver)
    assert ("Your driver" in gpu_builds.advice((9, 0), driver)) == bool(driver)


@pytest.mark.parametrize("capability", [None, (3, 7), (7, 0), (9, 0), (10, 0), (11, 0), (12, 0)])
def test_short_advice_leaves_room_for_the_rest_of_an_error(capability):
    """An error message keeps 600 characters, and loses its middle beyond them."""
    assert 50 < len(gpu_builds.short_advice(capability)) <= 320


def test_a_library_that_could_not_be_read_accuses_no_gpu():
    assert check_gpus(reading(H200), replace(GPU_BUILD, code=None)) == []
    assert gpus.code_for(H200, replace(GPU_BUILD, code=None)) == "unknown"


def test_a_capability_that_is_not_told_accuses_no_gpu():
    assert check_gpus(reading(Gpu(0)), GPU_BUILD) == []
    assert "cannot use GPU 0" in one(check_gpus(reading(Gpu(0)), CPU_BUILD)).what


def test_a_lost_gpu_is_told():
    one(check_gpus(reading(Gpu(0, name="NVIDIA A100", trouble="GPU is lost")), GPU_BUILD), "GPU is lost", "Xid")


def test_mig_devices_are_seen_one_at_a_time():
    one(check_gpus(reading(MIG), GPU_BUILD), "2 devices", "CUDA_VISIBLE_DEVICES=MIG-1", "-i 1 -mig 0")


def test_mig_without_devices_shows_nothing():
    one(check_gpus(reading(replace(MIG, mig=())), GPU_BUILD), "no MIG device", "mig -i 1 -cgi")


def test_a_gpu_that_others_fill_is_told():
    full = replace(A100, used_bytes=30 * GIB, free_bytes=10 * GIB, processes=(GpuProcess(42, "python", 29 * GIB),))
    one(check_gpus(reading(full), GPU_BUILD), "30.0 GiB of 40.0 GiB", "process 42 (python, 29.0 GiB)")
    hidden = replace(full, processes=(GpuProcess(42, "", None),))
    one(check_gpus(reading(hidden), GPU_BUILD), "process 42 (name hidden, ?)")
    one(check_gpus(reading(replace(full, processes=None)), GPU_BUILD), "processes that are hidden here")


def test_memory_that_this_process_takes_is_not_told():
    own = replace(A100, used_bytes=30 * GIB, processes=(GpuProcess(1, "python", 29 * GIB),))
    assert check_gpus(reading(own), GPU_BUILD) == []


def test_a_hot_gpu_is_told_and_a_busy_one_is_not():
    hot = replace(A100, temperature_c=93, throttle_reasons=("power limit", "temperature, by hardware"))
    assert "power limit" not in one(check_gpus(reading(hot), GPU_BUILD), "at 93 C", "temperature, by hardware").what
    assert check_gpus(reading(replace(A100, throttle_reasons=("power limit", "application clocks"))), GPU_BUILD) == []


@pytest.mark.parametrize("value", ["", "-1", "7", "1,1"])
def test_an_environment_that_hides_all_gpus_is_told(value):
    v100s = [replace(A100, index=i, uuid=f"GPU-{i}") for i in range(2)]
    found = check_gpus(reading(*v100s, CUDA_VISIBLE_DEVICES=value), GPU_BUILD)
    one(found, f"CUDA_VISIBLE_DEVICES={value!r} shows none of 2 GPUs")
    assert explains(reading(*v100s, CUDA_VISIBLE_DEVICES=value), GPU_BUILD)


def test_gpus_that_are_hidden_without_the_environment_are_not_its_fault():
    """MIG is on, and has no devices: no value of the variable would show one."""
    found = check_gpus(reading(replace(MIG, mig=()), CUDA_VISIBLE_DEVICES="0"), GPU_BUILD)
    assert "no MIG device" in found[0].what and not any("CUDA_VISIBLE_DEVICES" in problem.what for problem in found)


def test_an_environment_that_shows_some_is_fine():
    pair = [replace(A100, index=i, uuid=f"GPU-{i}") for i in range(2)]
    shown = reading(*pair, CUDA_VISIBLE_DEVICES="1")
    assert check_gpus(shown, GPU_BUILD) == []
    assert names_in_mxnet(shown) == {1: "gpu(0)"}


def test_gpus_of_two_kinds_may_be_numbered_otherwise():
    v100 = replace(A100, index=0, uuid="GPU-7", name="Tesla V100", compute_capability=(7, 0))
    one(check_gpus(reading(v100, A100), GPU_BUILD), "the numbers may differ", "Set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    assert check_gpus(reading(v100, A100, CUDA_DEVICE_ORDER="PCI_BUS_ID"), GPU_BUILD) == []


def test_no_driver_matters_only_where_one_is_needed():
    why = "nvml: got 'NVML Shared Library Not Found' from the NVIDIA driver; expected a working driver. Install NVIDIA's driver."
    without = Reading(None, why, False)
    assert check_driver(without, CPU_BUILD) == []
    one(check_driver(without, GPU_BUILD), "NVML Shared Library Not Found", "Expected a working driver. Install NVIDIA's driver.")
    one(check_driver(replace(without, has_signs=True), CPU_BUILD), "The GPUs cannot be read")
    assert check_gpus(without, GPU_BUILD) == []
    assert not explains(without, CPU_BUILD)


def test_an_old_driver_cannot_run_cuda_11():
    old = Reading(Driver("440.33.01", "10.2", (A100,), ()), "", True)
    one(check_driver(old, GPU_BUILD), "440.33.01", "up to 10.2", "450.80.02")
    assert check_driver(old, CPU_BUILD) == []
    assert check_driver(reading(A100), GPU_BUILD) == []
    assert check_driver(Reading(Driver("440.33.01", "", (), ()), "", True), GPU_BUILD) == []


def test_a_driver_is_compared_with_the_cuda_of_the_library(monkeypatch):
    monkeypatch.setattr(gpus, "needed", lambda path: ["libcudart.so.12", "libcudnn.so.9"])
    old = Reading(Driver("470.57.02", "11.4", (A100,), ()), "", True)
    one(check_driver(old, ELSEWHERE), "up to 11.4", "needs 12.0", "525.60.13")
    assert check_driver(reading(A100), ELSEWHERE) == []


def test_signs_of_a_driver_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "try_driver", lambda: (None, "no package"))
    monkeypatch.setattr(gpus, "_SIGNS", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert gpus.read_gpus() == Reading(None, "no package", False, {"CUDA_VISIBLE_DEVICES": "3"}, os.getpid())
    (tmp_path / "nvidiactl").touch()
    assert gpus.read_gpus().has_signs


# MXNet, its libraries, the packages


def library(soname, path="there"):
    return CudaLibrary(soname.partition(".")[0], soname, path, "", "wheel" if path else "missing")


def test_missing_cudnn_stops_training():
    found = one(
        check_libraries([library("libcudart.so.11.0"), library("libcudnn.so.8", "")], BROKEN),
        "libcudnn (libcudnn.so.8), which is missing",
    )
    assert found.stops_training
    assert "gluon_mgpu[cu112]" in found.to_do


def test_a_missing_driver_is_told_apart_from_missing_libraries():
    without = [
        library("libcuda.so.1", ""),
        library("libcudnn.so.8", ""),
        library("libcufft.so.10", ""),
        library("libnccl.so.2", ""),
    ]
    driver, others = check_libraries(without, BROKEN)
    assert "libcuda.so.1" in driver.what and "--gpus all" in driver.to_do
    # MXNet itself names the other
    assert "libcudnn (libcudnn.so.8) and libcufft (libcufft.so.10), which are missing" in others.what


def test_libraries_that_are_there_are_fine_and_none_are_needed_without_gpus():
    assert check_libraries([library("libcudart.so.11.0")], GPU_BUILD) == []
    assert check_libraries([], CPU_BUILD) == []


def test_an_mxnet_that_cannot_be_imported_stops_training():
    assert one(check_build(BROKEN), "libnccl.so.2").stops_training
    assert check_build(GPU_BUILD) == []


def test_builds_in_words():
    assert GPU_BUILD.described() == "machine code for compute capability 5.0, 6.0, 7.0, 8.0, 8.6; no PTX"
    assert replace(GPU_BUILD, code=FatBinaries((), ((7, 0),), 1)).described().endswith("capability none; PTX for 7.0")
    assert CPU_BUILD.described() == "none: this is a build for CPUs"
    assert replace(CPU_BUILD, code=None).described() == "unknown"
    assert GPU_BUILD.is_for_gpus and BROKEN.is_for_gpus and not CPU_BUILD.is_for_gpus


def test_numpy_2_stops_training_and_two_wheels_do_not():
    assert one(check_packages(Packages({"numpy": "2.1.0"}, ("mxnet",))), "NumPy 2.1.0", "'numpy<2'").stops_training
    assert check_packages(Packages({"numpy": "1.26.4"}, ("mxnet",))) == []
    assert check_packages(Packages({"numpy": "not installed"}, ())) == []
    assert not one(check_packages(Packages({}, ("mxnet", "mxnet-cu112"))), "pip uninstall mxnet mxnet-cu112").stops_training


@pytest.mark.parametrize(
    "name, is_one", [("mxnet", True), ("MXNet_cu117", True), ("mxnet-cu92mkl", True), ("mxnet-tools", False), ("gluonnlp", False)]
)
def test_wheels_of_mxnet_are_known_by_name(monkeypatch, name, is_one):
    monkeypatch.setattr(machine.metadata, "distributions", lambda: [SimpleNamespace(metadata={"Name": name}, locate_file=str)])
    assert bool(machine._wheels()) == is_one


# Settings


def setting(device, number, source="environment"):
    return Setting(f"threads of cpu({device})", number, source, "Why.")


ENGINE = Engine(1, False)


def test_two_contexts_with_several_threads_can_hang():
    found = check_openblas([setting(0, "2"), setting(1, "4")], ["BLAS_OPEN"], ENGINE)
    one(found, "cpu(0) with 2 threads and cpu(1) with 4 threads", "OMP_NUM_THREADS=1")


def test_two_workers_of_one_context_can_hang():
    one(check_openblas([setting(0, "2")], ["BLAS_OPEN"], Engine(2, False)), "cpu(0)", "Unset MXNET_CPU_WORKER_NTHREADS")


@pytest.mark.parametrize(
    "counts, features, engine",
    [
        (["1", "1"], ["BLAS_OPEN"], ENGINE),
        (["8"], ["BLAS_OPEN"], ENGINE),
        (["8", "1"], ["BLAS_OPEN"], ENGINE),
        (["2", "2"], ["BLAS_MKL"], ENGINE),
        (["2", "2"], ["BLAS_OPEN"], Engine(1, True)),
        (["unknown", "unknown"], ["BLAS_OPEN"], ENGINE),
        (["1"], ["BLAS_OPEN"], Engine(2, False)),
    ],
    ids=["one-each", "alone", "one-of-two", "mkl", "serial", "unknown", "workers-of-one-thread"],
)
def test_what_cannot_hang_is_not_told(counts, features, engine):
    assert check_openblas([setting(i, number) for i, number in enumerate(counts)], features, engine) == []


def test_a_switch_is_told_unless_it_is_off():
    one(check_settings([], "no"), "GLUON_MGPU_RUNTIME=no")
    assert check_settings([], "Off") == check_settings([], "") == []
    one(check_settings([Setting("MXNET_CPU_TEMP_COPY", "4", "MXNet's default", environment.TOO_LATE)], ""), "could not be set")


# Where files go

ROOM = StorageLocation("checkpoints", "runs", tempfile.gettempdir(), 100 * GIB, 50 * GIB, 1000, True)
SHARED = replace(ROOM, use="shared memory", folder="/dev/shm", total_bytes=8 * GIB, free_bytes=8 * GIB)


@pytest.mark.parametrize(
    "changes, words, stops",
    [
        ({"free_bytes": 0}, ["0 MiB of 100.0 GiB are free"], True),
        ({"free_bytes": 99 * 2**20}, ["99 MiB"], True),
        ({"free_bytes": GIB}, ["1.0 GiB of"], False),
        ({"free_files": 0}, ["inode"], True),
        ({"writable": False}, ["read-only"], True),
        ({"exists_at": __file__}, ["is not a folder"], True),
    ],
    ids=["full", "nearly-full", "little", "inodes", "read-only", "file"],
)
def test_where_checkpoints_cannot_go(changes, words, stops):
    assert one(check_checkpoints(replace(ROOM, **changes)), "--output", *words).stops_training == stops


def test_room_for_checkpoints_is_fine():
    assert check_checkpoints(ROOM) == check_checkpoints(replace(ROOM, free_files=None)) == []


def test_temporary_files_need_a_folder_with_room():
    assert check_temporary(ROOM) == []
    one(check_temporary(None), "No folder", "TMPDIR")
    one(check_temporary(replace(ROOM, free_bytes=0)), "is full", "TMPDIR")
    one(check_temporary(replace(ROOM, free_files=0)), "is full")


def test_shared_memory_that_is_small_full_closed_or_missing():
    assert check_shared_memory(SHARED) == []
    docker = replace(SHARED, total_bytes=64 * 2**20, free_bytes=64 * 2**20)
    assert not one(check_shared_memory(docker), "64 MiB", "bus error", "--shm-size", "num_workers=0").stops_training
    one(check_shared_memory(replace(SHARED, free_bytes=2**20)), "1 MiB of 8.0 GiB free", "ls -l /dev/shm")
    one(check_shared_memory(replace(SHARED, writable=False)), "chmod 1777")
    one(check_shared_memory(None), "/dev/shm does not exist", "mount -t tmpfs")


def test_places_are_looked_at_where_they_would_be_made(tmp_path):
    system = os.statvfs(tmp_path)
    place = storage.inspect_checkpoints(str(tmp_path / "runs" / "first"))
    assert place.exists_at == str(tmp_path)
    assert place.total_bytes == system.f_blocks * system.f_frsize
    assert 0 < place.free_bytes <= place.total_bytes
    assert place.writable


def test_a_read_only_file_system_is_seen(monkeypatch, tmp_path):
    full = SimpleNamespace(f_flag=os.ST_RDONLY, f_files=0, f_favail=0, f_blocks=10, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    place = storage.inspect_checkpoints(str(tmp_path))
    assert (place.writable, place.free_files, place.total_bytes, place.free_bytes) == (False, None, 40960, 0)


def test_no_folder_for_temporary_files(monkeypatch):
    def nowhere():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert storage.inspect_temporary() is None


def test_no_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "SHARED_MEMORY", str(tmp_path / "shm"))
    assert storage.inspect_shared_memory() is None
    (tmp_path / "shm").mkdir()
    assert storage.inspect_shared_memory().exists_at == str(tmp_path / "shm")


# What sums gradients


def test_stores_follow_what_mxnet_was_built_with():
    assert [store.name for store in stores_of(()) if store.there] == ["local", "device"]
    assert all(store.there for store in stores_of(GPU_BUILD.features))
    assert {store.name: store.what for store in stores_of(CPU_BUILD.features)}["nccl"] == "this build lacks NCCL"


def install_horovod(monkeypatch, module):
    """Let there be a Horovod; `module` is its horovod.mxnet, or the error that importing it gives."""

    def import_module(name):
        assert name == "horovod.mxnet"
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(stores.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(stores.importlib, "import_module", import_module)
    monkeypatch.setattr(stores.metadata, "version", lambda name: "0.28.1")


def test_horovod_says_what_it_was_built_with(monkeypatch):
    parts = {"mpi_built": lambda: False, "gloo_built": lambda: True, "nccl_built": lambda: 21005}
    install_horovod(monkeypatch, SimpleNamespace(**parts))
    assert inspect_horovod() == Horovod("0.28.1", "", ("gloo", "nccl"))
    assert inspect_horovod().described() == "0.28.1, built with gloo, nccl"
    assert check_horovod(inspect_horovod()) == []


def test_horovod_that_was_built_without_mxnet_is_told(monkeypatch):
    install_horovod(monkeypatch, ImportError("Extension horovod.mxnet has not been built.\nmore"))
    one(check_horovod(inspect_horovod()), "has not been built", "HOROVOD_WITH_MXNET=1")
    assert inspect_horovod().described().startswith("0.28.1, which does not work with this MXNet: Extension horovod.mxnet")


def test_horovod_that_no_package_manager_has_installed_has_no_version(monkeypatch):
    def missing(name):
        raise stores.metadata.PackageNotFoundError(name)

    install_horovod(monkeypatch, SimpleNamespace(gloo_built=lambda: True))
    monkeypatch.setattr(stores.metadata, "version", missing)
    assert inspect_horovod().described() == "of unknown version, built with gloo"


def test_horovod_without_mpi_and_gloo_is_told():
    one(check_horovod(Horovod("0.28.1", "", ("nccl",))), "neither MPI nor Gloo", "HOROVOD_WITH_GLOO=1")


def test_no_horovod_is_fine():
    assert check_horovod(Horovod("", "", ())) == []
    assert Horovod("", "", ()).described() == "not installed"


# All together


def test_a_check_that_fails_is_a_finding_and_the_others_are_made():
    def fails(number):
        raise ZeroDivisionError(f"division of {number}\nmore")

    exam = Examination()
    assert exam.run("numbers", 7, fails, 3) == 7
    exam.check("more numbers", fails, 4)
    exam.check("the last", lambda: [Problem("the last", "It is wrong.", "Mend it.")])
    assert [finding.check for finding in exam.findings] == ["numbers", "more numbers", "the last"]
    assert exam.findings[0].what == "The check of numbers failed: ZeroDivisionError: division of 3"
    assert not exam.findings[0].stops_training


LOOKS = ["inspect_machine", "inspect_packages", "inspect_build", "inspect_code", "libraries", "read_gpus", "barred"]
LOOKS += ["inspect_pools", "inspect_engine", "inspect_checkpoints", "inspect_temporary", "inspect_shared_memory"]
LOOKS += ["inspect_horovod", "stores_of"]
CHECKS = ["check_packages", "check_build", "check_libraries", "check_driver", "check_gpus", "check_settings", "check_openblas"]
CHECKS += ["check_checkpoints", "check_temporary", "check_shared_memory", "check_horovod", "explains"]


@pytest.mark.parametrize("name", LOOKS + CHECKS)
def test_the_doctor_survives_whatever_fails(monkeypatch, name):
    def fails(*arguments):
        raise OSError(f"{name} has failed")

    monkeypatch.setattr(report, name, fails)
    found = doctor.examine("cpu:1")
    assert any(f"OSError: {name} has failed" in finding.what for finding in found.findings)
    assert doctor.tables_of(found)[-1].title == "problems"
    assert found.as_json()["problems"]


def test_errors_in_the_house_form_are_told_in_two_parts():
    assert describe_error(ValueError("fit: got 0; expected 1. Pass 1.")) == ("fit: got 0", "Expected 1. Pass 1.")
    assert describe_error(OSError("no such file")) == ("no such file", "Follow the message.")
    assert describe_error(KeyError()) == ("KeyError", "Follow the message.")


def table(found, title):
    return next(list(map(list, one.rows)) for one in doctor.tables_of(found) if one.title == title)


@pytest.fixture(scope="module")
def healthy():
    """A report of this machine, whose parts are replaced by recorded ones."""
    return doctor.examine("cpu:1")


def test_tables_of_a_machine_with_gpus(healthy):
    links = (Link(0, 1, "NVLink", "", 12, 300e9, True), Link(0, 2, "PCIe", "through one PCIe switch", None, None, None))
    busy = replace(A100, index=0, processes=(GpuProcess(42, "python", 29 * GIB),))
    driver = Driver("535.104.05", "12.2", (busy, replace(MIG, mig=MIG.mig[:1]), replace(H200, index=2, utilization=None)), links)
    found = replace(healthy, build=GPU_BUILD, reading=Reading(driver, "", True, {"CUDA_VISIBLE_DEVICES": "2,0"}))
    assert table(found, "NVIDIA driver") == [["version", "535.104.05"], ["CUDA up to", "12.2"]]
    assert table(found, "GPUs") == [
        ["0", "gpu(1)", "NVIDIA A100-SXM4-40GB", "8.0", "8.0"],
        ["1", "-", "NVIDIA A100-SXM4-40GB", "8.0", "8.0"],
        ["2", "gpu(0)", "NVIDIA H200", "9.0", "none"],
    ]
    assert table(found, "now on the GPUs")[0] == ["0", "39.0 GiB", "40.0 GiB", "5 %", "40 C", "process 42 (python, 29.0 GiB)"]
    assert table(found, "now on the GPUs")[2][3:] == ["?", "31 C", "none seen"]
    assert table(found, "MIG devices") == [["1", "MIG-1", "A100 MIG 1g.5gb", "5.0 GiB"]]
    assert table(found, "links") == [
        ["0-1", "NVLink x12", "300", "yes", "-"],
        ["0-2", "PCIe", "?", "?", "through one PCIe switch"],
    ]


def test_the_machine_in_words(healthy):
    words = replace(healthy, machine=Machine("Linux", "A processor", 2, 4, 8, 1.5, 3 * GIB, GIB)).here()
    assert words["cores"] == "2 to use: this process is bound to 4 of 8, and a cgroup allows 1.5"
    assert words["memory"] == "3.0 GiB, 1.0 GiB of it available"
    unlimited = replace(healthy, machine=Machine("Linux", "A processor", 8, 8, 8, 0.0, 0, 0)).here()
    assert unlimited["cores"].endswith("of 8, without a quota")


def test_json_of_a_machine_with_gpus(healthy):
    link = Link(0, 1, "NVLink", "", 12, 300e9, True)
    driver = Driver("535.104.05", "12.2", (A100, H200), (link,))
    libraries = (CudaLibrary("cuDNN", "libcudnn.so.8", "/cuda/lib/libcudnn.so.8", "8.9.6", "wheel"),)
    wrong = (Problem("GPUs", "It is wrong.", "Mend it.", True),)
    found = replace(healthy, build=GPU_BUILD, reading=Reading(driver, "", True), libraries=libraries, findings=wrong)
    plain = found.as_json()
    assert plain["gpu_code"] == {"machine_code": ["5.0", "6.0", "7.0", "8.0", "8.6"], "ptx": [], "num_binaries": 198}
    assert plain["driver"] == {"version": "535.104.05", "cuda_version": "12.2", "why_not": ""}
    assert [(gpu["name"], gpu["code"]) for gpu in plain["gpus"]] == [("NVIDIA A100-SXM4-40GB", "8.0"), ("NVIDIA H200", "none")]
    assert plain["links"][0]["num_links"] == 12
    assert plain["libraries"][0]["version"] == "8.9.6"
    assert plain["problems"] == [{"check": "GPUs", "what": "It is wrong.", "to_do": "Mend it.", "stops_training": True}]
    assert found.stops_training
    assert not replace(found, findings=(replace(wrong[0], stops_training=False),)).stops_training


def test_an_mxnet_that_cannot_be_imported_leaves_the_other_checks(monkeypatch):
    monkeypatch.setattr(report, "inspect_build", lambda: BROKEN)
    monkeypatch.setattr(report, "inspect_code", lambda library: CU112)
    found = doctor.examine("cpu:1")
    assert found.stops_training
    assert found.devices == found.settings == found.stores == ()
    assert found.places and found.machine
    assert ["mxnet was built with", "unknown: it cannot be imported"] in table(found, "machine and packages")
    assert table(found, "problems")[0][0] == BROKEN.why_not
