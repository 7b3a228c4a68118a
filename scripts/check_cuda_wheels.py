"""Install the extra cu112 into a new environment, and show that MXNet's GPU wheel runs there without CUDA or a GPU.

    python scripts/check_cuda_wheels.py
    python scripts/check_cuda_wheels.py --python python3.9 --keep --folder check-cu112    # a second call reuses the folder

A library of a few lines replaces the NVIDIA driver: it reports that there is no GPU. Everything else is genuine: about 2 GB from
the package index. This script cannot show that anything runs on a GPU: use scripts/gpu_report.py for that.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Dict, List, Optional

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["test_transparency.py", "test_parity.py", "test_no_sync.py", "test_resume.py"]
NEEDED_GB = 9
MADE = ("driver", "project", "tmp", "venv", "install.log", "installed")
LEFT_OUT = (".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".coverage")

# What `import mxnet` and the CUDA runtime ask of a driver. cuInit and the rest answer CUDA_ERROR_NO_DEVICE, 100 (cuda.h).
DRIVER = """
int cuDriverGetVersion(int *version) { *version = 11080; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 100; }
""" + "".join(
    f"int {name}(void) {{ return 100; }}\n"
    for name in (
        "cuInit",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuGraphKernelNodeGetParams",
        "cuGraphNodeGetType",
        "cuLaunchKernel",
        "cuModuleGetFunction",
        "cuModuleLoadData",
        "cuModuleLoadDataEx",
        "cuModuleUnload",
    )
)

# mxnet first, as in a script that knows nothing of this package.
SHOW = """
import time
started = time.perf_counter()
import mxnet as mx
seconds = time.perf_counter() - started
import gluon_mgpu, platform, numpy
from gluon_mgpu import cuda
from importlib import metadata
features = mx.runtime.Features()
enabled = [name for name in ("CUDA", "CUDNN", "NCCL") if features.is_enabled(name)]
print(f"Python {platform.python_version()}, numpy {numpy.__version__}, mxnet-cu112 {metadata.version('mxnet-cu112')}")
print(f"import mxnet: {seconds:.1f} s; enabled: {', '.join(enabled)}; num_gpus() == {mx.context.num_gpus()}")
print(f"usable GPUs: {gluon_mgpu.devices.select.usable_gpus()}; 1 + 1 on {mx.cpu()}: {(mx.nd.ones((1,)) + 1).asscalar():.0f}")
print()
print("| library | soname | version | source |")
print("|---|---|---|---|")
for library in cuda.libraries():
    print(f"| {library.name} | `{library.soname}` | {library.version} | {library.source} |")
assert enabled == ["CUDA", "CUDNN", "NCCL"] and mx.context.num_gpus() == 0
assert all(library.source == "wheel" for library in cuda.libraries()[1:])
"""

REFUSED = """
import ctypes
try:
    ctypes.CDLL("libcuda.so.1")
    print("not shown: this machine has one")
except OSError:
    try:
        import gluon_mgpu
    except ImportError as error:
        print(error)
    else:
        raise SystemExit("import gluon_mgpu went well without a driver")
"""


class CheckError(RuntimeError):
    """The check could not run, or failed."""


def main() -> int:
    """Run the check; return 0 if it passed."""
    options = parse()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="check_cuda_wheels_")).resolve()
    if folder.exists() and any(folder.iterdir()) and not (folder / "driver" / "libcuda.so.1").exists():
        print(f"check: got {folder}, which is not empty; expected an empty folder. Pass another --folder.", file=sys.stderr)
        return 1
    began = time.perf_counter()
    try:
        check(folder, options)
        print(f"\npassed, {time.perf_counter() - began:.0f} s")
        return 0
    except CheckError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    finally:
        if options.keep:
            print(f"kept {folder}")
        else:
            clean(folder)


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description="Install the extra cu112 into a new environment, with a driver that reports no GPU; "
        "show the import and the CUDA libraries, and run the contract tests on CPU contexts. Downloads about 2 GB.",
    )
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment: 3.8 to 3.12 (default: this one)")
    parser.add_argument("--folder", help="an empty folder for everything (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="leave the folder, which a second call with --folder uses")
    parser.add_argument("--tests", nargs="*", default=TESTS, metavar="FILE", help="files of tests/ to run; none: no tests")
    parser.add_argument("--compiler", default="cc", help="the C compiler (default: cc)")
    return parser.parse_args()


def check(folder: Path, options: argparse.Namespace) -> None:
    """Go from an empty folder to tests that passed."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise CheckError(f"check: got {sys.platform} on {platform.machine()}; expected Linux on x86_64. The wheels are for that.")
    folder.mkdir(parents=True, exist_ok=True)
    driver = make_driver(folder, options.compiler)
    python = folder / "venv" / "bin" / "python"
    if not (folder / "installed").exists():
        install(folder, options.python)
    quiet = {"LD_LIBRARY_PATH": "", "PYTHONWARNINGS": "ignore"}
    print("\nwith a driver that knows no GPU\n")
    run("show", [str(python), "-c", SHOW], folder, {**quiet, "LD_LIBRARY_PATH": str(driver)}, limit_s=120)
    print("\nwithout a driver\n")
    run("show the error", [str(python), "-c", REFUSED], folder, quiet, limit_s=120)
    if options.tests:
        print(f"\n{' '.join(options.tests)}\n")
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--durations=0", "--durations-min=60"]
        files = [str(Path("tests") / Path(name).name) for name in options.tests]
        run("test", [*command, *files], folder / "project", {**quiet, "LD_LIBRARY_PATH": str(driver)}, limit_s=3600)


def clean(folder: Path) -> None:
    """Delete what this program made in a folder, and the folder where nothing else is in it."""
    for name in MADE:
        shutil.rmtree(folder / name, ignore_errors=True)
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        folder.rmdir()


def make_driver(folder: Path, compiler: str) -> Path:
    """Return the folder of a libcuda.so.1 that reports no GPU."""
    driver = folder / "driver"
    if (driver / "libcuda.so.1").exists():
        return driver
    if not shutil.which(compiler):
        raise CheckError(
            f"check: got no program {compiler!r}; expected a C compiler, which makes the driver that knows no GPU. Debian, "
            "Ubuntu: apt install gcc; or name another one: --compiler clang."
        )
    driver.mkdir(parents=True)
    (driver / "driver.c").write_text(DRIVER, encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    run("compile the driver", command, driver, {}, limit_s=60)
    return driver


def install(folder: Path, python: str) -> None:
    """Make an environment in the folder, and install a copy of this project in it, with the extras cu112 and dev."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < NEEDED_GB:
        raise CheckError(f"check: got {free_gb:.1f} GB free in {folder}; expected {NEEDED_GB}. Name another place: --folder.")
    if not shutil.which(python):
        raise CheckError(f"check: got no program {python!r}; expected a Python from 3.8 to 3.12. Name one: --python python3.11.")
    shutil.rmtree(folder / "project", ignore_errors=True)
    shutil.copytree(ROOT, folder / "project", ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    (folder / "tmp").mkdir(exist_ok=True)
    run("make an environment", [python, "-m", "venv", "--clear", str(folder / "venv")], folder, {}, limit_s=120)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "--no-cache-dir", "--disable-pip-version-check"]
    project = f"{folder / 'project'}[cu112,dev,train]"
    began = time.perf_counter()
    print("installing", flush=True)
    command = [*pip, "install", "--progress-bar", "off", project]
    run("install", command, folder, {"TMPDIR": str(folder / "tmp")}, log="install.log")
    print(f"installed in {time.perf_counter() - began:.0f} s: {size_of(folder / 'venv') / 1e9:.1f} GB")
    (folder / "installed").write_text("", encoding="utf-8")


def run(
    what: str, command: List[str], where: Path, environment: Dict[str, str], *, limit_s: int = 3600, log: Optional[str] = None
) -> None:
    """Run a command to its end. Its output goes to the terminal, or to a file, with a line of progress every 20 seconds."""
    taken = ("PYTHONPATH", "PYTHONHOME", "GLUON_MGPU_RUNTIME", "MXNET_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
    full = {**{name: value for name, value in os.environ.items() if name not in taken}, **environment}
    path = where / log if log else None
    output = open(path, "wb") if path else None  # noqa: SIM115 (closed below)
    began = time.perf_counter()
    sys.stdout.flush()
    process = subprocess.Popen(command, cwd=str(where), env=full, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                code = process.wait(timeout=20)
                break
            except subprocess.TimeoutExpired:
                seconds = time.perf_counter() - began
                if seconds > limit_s:
                    raise CheckError(f"check: got no end of {what!r} after {limit_s} s; expected one. Run it by hand.") from None
                if path:
                    print(f"  {seconds:.0f} s, {size_of(where) / 1e9:.1f} GB: {last_line(path)}", flush=True)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if output:
            output.close()
    if code:
        end = "".join(f"\n  {line}" for line in path.read_text(errors="replace").splitlines()[-15:]) if path else ""
        raise CheckError(f"check: got exit status {code} of {what!r}; expected 0. Check its output above.{end}")


def last_line(path: Path) -> str:
    """Return the last line of a log, cut to a terminal's width."""
    lines = path.read_text(errors="replace").splitlines()
    return lines[-1].strip()[:90] if lines else ""


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder; files that vanish meanwhile count as nothing."""
    total = 0
    for where, _, names in os.walk(str(folder)):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return total


if __name__ == "__main__":
    sys.exit(main())
