# Find a Python, make .venv with it, and install this project there. quickstart.sh and test.sh read this file.
# A second call reuses .venv. PYTHON=/path/to/python chooses the Python; .venv can be deleted at any time.

set -eu
unset PYTHONDONTWRITEBYTECODE # every process would compile MXNet again
venv=.venv
cd "$(dirname "$0")/.."

if [ "$(uname -s) $(uname -m)" != "Linux x86_64" ]; then
    echo "Setting up: got $(uname -s) $(uname -m); tested on Linux x86_64. docs/compatibility.md#windows-macos-and-arm64 says what works elsewhere." >&2
fi

suits='import platform, struct, sys
v = sys.version_info[:2]
sys.exit(0 if (3, 8) <= v <= (3, 14) and platform.python_implementation() == "CPython" and struct.calcsize("P") == 8 else 1)'

find_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3.11 python3.10 python3.9 python3.12 python3.13 python3.14 python3.8 python3 python; fi
    for name in "$@"; do
        # A program on the PATH may not run, such as a version manager's placeholder.
        if command -v "$name" >/dev/null 2>&1 && "$name" -c "$suits" >/dev/null 2>&1; then
            echo "$name"
            return 0
        fi
    done
    {
        echo "Setting up: found no suitable Python; expected CPython 3.8 to 3.14 (64 bit), with pip."
        for name in "$@"; do
            if command -v "$name" >/dev/null 2>&1; then
                echo "  $name: $("$name" -c 'import platform; print(platform.python_implementation(), platform.python_version())' 2>/dev/null || echo "does not run")"
            fi
        done
        echo "Install one (Debian, Ubuntu: apt install python3 python3-venv), or pass its path: PYTHON=/path/to/python3.11 sh $0"
    } >&2
    return 1
}

check_libraries() { # $1: python
    [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || return 0
    missing=$("$1" -c 'import ctypes
for file, package in (("libgomp.so.1", "libgomp1"), ("libquadmath.so.0", "libquadmath0"), ("libstdc++.so.6", "libstdc++6")):
    try:
        ctypes.CDLL(file)
    except OSError:
        print(end=f" {package}")')
    [ -z "$missing" ] || {
        echo "Setting up: got no$missing; expected the libraries of the system that MXNet's wheel is linked to." >&2
        echo "Debian, Ubuntu: apt-get install -y$missing" >&2
        echo "Fedora: dnf install -y$(echo "$missing" | tr -d 0-9)" >&2
        return 1
    }
}

make_venv() { # $1: python
    rm -rf "$venv"
    # Where ensurepip is missing (Debian without python3-venv), the pip of the system fills an environment that has none.
    if ! "$1" -m venv "$venv" >/dev/null 2>&1; then
        rm -rf "$venv"
        "$1" -m venv --without-pip "$venv" || {
            echo "Setting up: $1 -m venv failed; expected Python's venv module. Debian, Ubuntu: apt install python3-venv" >&2
            return 1
        }
        "$1" -m pip --python "$venv/bin/python" install --quiet pip || {
            echo "Setting up: $1 -m pip failed; expected pip 22.3 or newer, or python3-venv. Debian, Ubuntu: apt install python3-venv" >&2
            return 1
        }
    fi
}

install_project() { # $1: extras
    python=$(find_python)
    wanted="$("$python" -c 'import sys; print(sys.version, sys.base_prefix)') $1 $(sed "/^\[mypy\]/,\$d" setup.cfg | cksum)"
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/installed-$1" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    check_libraries "$python"
    version=$("$python" -c 'import platform; print(platform.python_version())')
    echo "Setting up $venv with Python $version: downloads about 200 MB once, and takes about a minute."
    # The packages of another extra may stay; those of another Python may not.
    if ! [ -x "$venv/bin/python" ] || [ "$("$venv/bin/python" -c 'import platform; print(platform.python_version())' 2>/dev/null)" != "$version" ]; then
        make_venv "$python"
    fi
    # The pip that comes with Python may be years old, and need twice the time to choose versions.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
    # The first use compiles what it imports: a tenth of all modules. Newer setuptools warn about the names of folders.
    "$venv/bin/python" -W "ignore:Editable installation" -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[$1]"
    # Already there before Python 3.13. Later, pip finds no NumPy that fits what MXNet's metadata asks for.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps mxnet==1.9.1
    echo "$wanted" >"$venv/installed-$1"
}
