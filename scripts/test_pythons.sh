#!/bin/sh
# Run the tests and a training with several versions of Python and NumPy, and print a table:
#
#     sh scripts/test_pythons.sh                       # the pairs below whose Python is installed
#     sh scripts/test_pythons.sh python3.13=2 /opt/bin/python3.11=1.26.4 -- tests/test_parity.py
#
# An argument names a Python and a version of NumPy; 2 is the newest 2.x. Arguments after -- are pytest's. The script fails if a test
# fails, or if the weights of the trainings differ in one bit. Environments (1 GB each) and logs stay in .venv-pythons for the next run.

case "${1:-}" in -h | --help)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
. "$(dirname "$0")/environment.sh"
folder=.venv-pythons
pairs=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    "${1%=*}" -c "$suits" || {
        echo "Python versions: got $1; expected PYTHON=NUMPY with a Python that runs, such as python3.13=2. See --help." >&2
        exit 2
    }
    pairs="$pairs $1"
    shift
done
[ $# -eq 0 ] || shift
for pair in ${pairs:-python3.11=1.23.5 python3.11=1.26.4 python3.12=1.26.4 python3.13=2 python3.14=2}; do
    [ -n "$pairs" ] || "${pair%=*}" -c "$suits" 2>/dev/null || continue
    python=${pair%=*}
    venv=$folder/$("$python" -c 'import platform; print(platform.python_version())')-${pair##*=}
    wanted=$(sed "/^\[mypy\]/,\$d" setup.cfg | cksum)
    if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]; then
        check_libraries "$python"
        make_venv "$python"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
        "$venv/bin/python" -W "ignore:Editable installation" -m pip install --quiet --disable-pip-version-check --editable ".[train,dev]" \
            graphviz requests "numpy==${pair##*=}.*"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps mxnet==1.9.1
        echo "$wanted" >"$venv/installed"
    fi
    "$venv/bin/python" -m pytest -q -n 3 --dist worksteal "$@" >"$venv.log" 2>&1 || true
    "$venv/bin/python" scripts/training_hash.py "$venv.log" >"$venv.row" || echo "| $pair | failed |" >"$venv.row"
    rows="${rows:-} $venv.row"
done
[ -n "${rows:-}" ] || {
    echo "Python versions: got none of Python 3.11 to 3.14; expected one. Pass PYTHON=NUMPY: see --help." >&2
    exit 1
}
echo "| Python | NumPy | passed | failed | skipped | weights (SHA-256) |"
echo "|---|---|---|---|---|---|"
cat $rows
if cut -d "|" -f 5 $rows | grep -v "^ 0 $" >/dev/null; then
    echo "Python versions: got tests that fail; expected none. The logs are $folder/*.log." >&2
    exit 1
fi
[ "$(cut -d "|" -f 7 $rows | sort -u | wc -l)" -eq 1 ] || {
    echo "Python versions: got weights that differ; expected the same bits. NumPy's part of a training is in docs/reproducibility.md." >&2
    exit 1
}
