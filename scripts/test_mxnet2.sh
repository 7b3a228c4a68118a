#!/bin/sh
# Run the tests with MXNet 2.0.0b1, in an environment of its own, .venv-mxnet2: sh scripts/test_mxnet2.sh
# It skips tests marked mxnet1: docs/compatibility.md#mxnet-2 lists their features. Arguments are pytest's.

. "$(dirname "$0")/environment.sh"
venv=.venv-mxnet2
install_project train,dev
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check mxnet==2.0.0b1
export OMP_NUM_THREADS=1
if [ $# -gt 0 ]; then
    exec "$venv/bin/python" -m pytest "$@"
fi
exec "$venv/bin/python" -m pytest -n 3 --dist worksteal
