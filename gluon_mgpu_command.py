"""The command gluon-mgpu. Where MXNet cannot be imported, its one subcommand is doctor, which says why."""

from __future__ import annotations

import importlib
import importlib.util
import sys


def main() -> None:
    """Run the command, or the doctor alone."""
    try:
        command = importlib.import_module("gluon_mgpu.cli").main
    except ImportError as error:
        _without_mxnet(error)
    else:
        command(prog_name="gluon-mgpu")


def _without_mxnet(error: ImportError) -> None:
    if sys.argv[1:2] != ["doctor"]:
        sys.exit(f"Error: {error}\ngluon-mgpu doctor tells what is here, and what is missing.")
    for name in ("gluon_mgpu", "gluon_mgpu.cli"):  # there for what is imported from them, but not run: they would import MXNet
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise error
        sys.modules[name] = importlib.util.module_from_spec(spec)
    importlib.import_module("gluon_mgpu.cli.doctor").doctor(sys.argv[2:], prog_name="gluon-mgpu doctor")


if __name__ == "__main__":
    main()
