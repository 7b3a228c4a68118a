#!/bin/sh
# Install each extra into a fresh environment, and try what it is for: sh scripts/test_extras.sh [EXTRA...]
# It downloads about 1 GB for all. Not here: cu112 (2 GB), ray (scripts/test_ray.sh), horovod (scripts/build_horovod.sh), dev (scripts/test.sh).
# gluoncv is no extra: it runs the recipes that need GluonCV.

. "$(dirname "$0")/environment.sh"
python=$(find_python)
project=$PWD
venv=$(mktemp -d)/venv
trap 'rm -rf "${venv%/venv}"' EXIT
trap 'exit 130' HUP INT TERM # dash calls the other one at an exit alone

check() { # $1: extra, $2: program
    make_venv "$python"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$project[cpu,$1]"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps mxnet==1.9.1 # for Python 3.13 and newer
    "$venv/bin/python" -m pip check --quiet || echo "  pip check: packages of $1 do not agree"
    if "$venv/bin/python" -m pip list --format freeze | grep -i -E "^(nvidia-(cu|nccl|nvtx)|torch|mxnet-cu)"; then
        echo "Extra $1: got packages of CUDA; expected none for a CPU." >&2
        return 1
    fi
    (cd "${venv%/venv}" && "$venv/bin/python" -c "import gluon_mgpu as mgpu
from mxnet import gluon, nd
$2")
    echo "$1: works, $(du -sm "$venv" | cut -f1) MB"
}

net='net = gluon.nn.Dense(2, in_units=3); net.initialize()'
for extra in ${*:-cpu all train seq2seq d2l gpu monitor doctor onnx tensorboard sync docs gluoncv}; do
    case $extra in
    all) check all "import onnxruntime, psutil, greenlet, sacrebleu, sentencepiece, tensorboardX, threadpoolctl" ;;
    train) check train "$net
figure = mgpu.plots.figure(); mgpu.data.load_digits()" ;;
    seq2seq) check seq2seq "mgpu.data.build_vocabulary(mgpu.data.korean_numbers(300).source, 'subwords', size=100)" ;;
    d2l) check d2l "from d2l import mxnet as d2l
assert d2l.Timer" ;;
    gpu) check gpu "import pynvml" ;;
    monitor) check monitor "print(mgpu.monitor.Reader().read().host)" ;;
    doctor) check doctor "import threadpoolctl" ;;
    onnx) check onnx "$net
mgpu.export(net, 'net.onnx', nd.ones((1, 3)))" ;;
    tensorboard) check tensorboard "mgpu.TensorBoard('runs')
import tensorboardX" ;;
    sync) check sync "import greenlet" ;;
    docs) check docs "import sphinx, furo, myst_nb, numpydoc" ;;
    cpu) check cpu "$net
net(nd.ones((1, 3))).wait_to_read()" ;;
    gluoncv)
        check sync "import greenlet"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check gluoncv==0.10.5.post0 opencv-python-headless pytest pytest-timeout \
            hypothesis "numpy<1.24"
        "$venv/bin/python" -m pytest -q tests/test_docs.py -k gluoncv
        ;;
    *)
        echo "Extras: got $extra; expected one of those in docs/installation.md that this script tries. See its first lines." >&2
        exit 2
        ;;
    esac
done
