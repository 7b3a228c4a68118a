#!/bin/sh
# Set everything up and run linters, types, tests, doctests and notebooks: sh scripts/test.sh
# Arguments are pytest's, and run pytest alone: sh scripts/test.sh tests/test_sharding.py -k weights

. "$(dirname "$0")/environment.sh"
install_project cpu,train,dev
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
# One process compiles what the tests import, while mypy runs. Otherwise each of the tests' hundred processes would.
.venv/bin/python -m pytest --collect-only -q >/dev/null &
.venv/bin/python -m mypy
wait
# Three at a time, on two cores: tests wait for the processes that they start.
exec .venv/bin/python -m pytest -n 3 --dist worksteal
