#!/bin/sh
# Build Horovod 0.28.1 for the installed MXNet: sh scripts/build_horovod.sh [PYTHON]
#
# PYTHON belongs to the environment with MXNet and this project, .venv/bin/python by default. The build requires a C++ compiler and
# takes some minutes. With NVIDIA GPUs, nvcc and NCCL, set HOROVOD_GPU_OPERATIONS=NCCL in the environment to sum on the GPUs.
# Use Horovod with: gluon-mgpu launch -n 2 --backend horovod train.py
#
# Horovod's build imports MXNet, so pip must not build it in an isolated environment. Its setup.py was written for setuptools below
# 70, its CMakeLists.txt for CMake below 4. The script fixes one line first: Horovod connects its processes twice, and the second
# time ignores the network interface in HOROVOD_GLOO_IFACE. It then uses the address of the machine's name, which is often a
# loopback address that other machines cannot reach.

set -eu
python=${1:-"$(dirname "$0")/../.venv/bin/python"}
case $python in */*) ;; *) python=$(command -v "$python") ;; esac

fail() {
    echo "build_horovod: $1" >&2
    exit 1
}

[ -x "$python" ] || fail "got no Python at $python; expected that of an environment with MXNet. Run sh scripts/quickstart.sh, or name one."
"$python" -c 'import gluon_mgpu' || fail "got no gluon_mgpu and MXNet in $python; expected both. Run $python -m pip install '.[cpu]'."
command -v "${CXX:-c++}" >/dev/null 2>&1 || fail "got no C++ compiler; expected one. Debian, Ubuntu: apt install g++ make."
command -v make >/dev/null 2>&1 || fail "got no make; expected it. Debian, Ubuntu: apt install make."

PATH=$(cd "$(dirname "$python")" && pwd):$PATH # of cmake, which pip brings
export PATH
export HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1

setuptools=$("$python" -m pip list --format=freeze | sed -n 's/^setuptools==/setuptools==/p')
echo "Building Horovod for $("$python" -c 'import sys; print(sys.prefix)'): some minutes."
"$python" -m pip install --quiet --disable-pip-version-check 'setuptools>=65,<70' wheel 'cmake>=3.13,<4' cffi cloudpickle psutil pyyaml packaging
folder=$(mktemp -d)
"$python" -m pip download --quiet --disable-pip-version-check --no-build-isolation --no-deps --no-binary :all: --dest "$folder" horovod==0.28.1
tar -xzf "$folder/horovod-0.28.1.tar.gz" -C "$folder"
source=$folder/horovod-0.28.1/horovod/common/gloo/gloo_context.cc
"$python" - "$source" <<'MEND'
import sys

path = sys.argv[1]
with open(path, encoding="utf-8") as file:
    text = file.read()
begin = text.index("void GlooContext::InitializeForProcessSet(")
setting, forgotten = "  gloo_iface_ = global_context.gloo_iface_;\n", "  device_attr.iface = gloo_iface_;\n"
place = text.index(forgotten, begin)
with open(path, "w", encoding="utf-8") as file:
    file.write(text[:place] + setting + text[place:])
MEND
if ! "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-cache-dir --no-deps --verbose \
    --force-reinstall "$folder/horovod-0.28.1" >"$folder/log" 2>&1; then
    tail -40 "$folder/log" >&2
    fail "the build failed; its complete output is in $folder/log"
fi
rm -rf "$folder"
[ -z "$setuptools" ] || "$python" -m pip install --quiet --disable-pip-version-check "$setuptools"

"$python" - <<'CHECK' || fail "got a Horovod that does not work with this MXNet; expected one that was built for it. Build it again."
import os, subprocess, sys, tempfile

program = "from gluon_mgpu.distributed import group; assert group().all_gather_bytes(b'here') == [b'here', b'here']"
with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "two.py"), "w") as file:
        file.write(program)
    command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", "2", "--backend", "horovod", "--log-dir", folder, file.name]
    sys.exit(subprocess.run(command, timeout=120).returncode)
CHECK
echo "Horovod works: two processes have met. gluon-mgpu launch -n 2 --backend horovod PROGRAM uses it."
