#!/bin/sh
# Build the site and serve it on this machine: sh scripts/docs.sh
# sh scripts/docs.sh --build only builds it, in build/site, and fails at each warning.

. "$(dirname "$0")/environment.sh"
install_project cpu,train,docs
.venv/bin/python -m sphinx -c docs -b html -q -W --keep-going . build/site
if [ "${1:-}" != --build ]; then
    echo "http://127.0.0.1:8000/docs/  (Ctrl-C ends)"
    exec .venv/bin/python -m http.server --bind 127.0.0.1 --directory build/site 8000
fi
