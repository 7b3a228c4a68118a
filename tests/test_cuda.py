"""CUDA's libraries of pip's wheels: found and loaded before MXNet, and brought by the extra."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"cuda_runtime", "cuda_nvrtc", "cublas", "cufft", "curand", "cusolver", "cudnn", "nccl", "nvtx"}


@pytest.mark.parametrize("damage", ["", "damaged", "missing"])
def test_libraries_of_wheels_are_loaded_with_what_they_need(tmp_path, damage):
    """Libraries that a compiler makes: mxnet needs cufft, and that another one."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler, cc")
    wheels = tmp_path / "site" / "nvidia"

    def compiled(folder, soname, source, *options):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a.c").write_text(source)
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(folder / soname), str(folder / "a.c"), *options]
        subprocess.run(command, check=True, timeout=240)
        return str(folder / soname)

    runtime = compiled(wheels / "cuda_runtime" / "lib", "libcudart.so.11.0", "int rt() { return 7; }")
    cufft = compiled(wheels / "cufft" / "lib", "libcufft.so.10", "int rt(); int cufft() { return rt(); }", runtime)
    mxnet = compiled(tmp_path / "mxnet", "libmxnet.so", "int cufft(); int used() { return cufft(); }", cufft)
    if damage:
        os.truncate(runtime, 100) if damage == "damaged" else os.unlink(runtime)
    program = f"import gluon_mgpu, ctypes; print(ctypes.CDLL({mxnet!r}).used())"
    environ = {**os.environ, "MXNET_LIBRARY_PATH": mxnet, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, timeout=240, text=True)
    if damage:  # the import says what is missing
        assert "OSError" in done.stderr and ("libcufft.so.10" in done.stderr or "libcudart.so.11.0" in done.stderr)
    else:
        assert done.stdout == "7\n", done.stderr


def test_the_extra_brings_every_library():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options.extras_require"]["cu112"].split("\n")
    found = [re.fullmatch(r"nvidia-(\w[\w-]*)-cu11==([\d.]+); .*Linux.* and .*x86_64.*", one) for one in lines if "-cu11=" in one]
    wheels = dict(match.groups() for match in found)
    assert {name.replace("-", "_") for name in wheels} == PACKAGES
    assert wheels["cudnn"].startswith("8.")
    assert any(one.startswith("mxnet-cu112==1.9.1;") for one in lines)
