#!/bin/sh
# Test with Ray, which is large, in an environment of its own: sh scripts/test_ray.sh
# It needs Python 3.10 or later, downloads 500 MB more once, and takes about 10 minutes. Arguments are pytest's.

. "$(dirname "$0")/environment.sh"
venv=.venv-ray
install_project cpu,train,dev,ray
"$venv/bin/python" -c "import ray"
exec "$venv/bin/python" -m pytest --timeout 300 tests/test_ray_nodes.py tests/test_ray_tune.py "$@"
