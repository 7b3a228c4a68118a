"""The command that runs a program: a script, a module, or a program on the PATH."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Sequence, Tuple

from ..process import LaunchError

_WORKER = ("-m", "gluon_mgpu.distributed.launcher.worker")  # a name, because importing it is for the worker


def program_command(program: Sequence[str], *, module: bool = False) -> Tuple[str, ...]:
    """Return the command for `train.py ...`, for a module with its arguments, or for a program on the PATH.

    Programs of this Python, also `python train.py` and `gluon-mgpu train resnet18`, run in `worker`, which ends them in order.

    Raises
    ------
    LaunchError
        The script or program does not exist.

    Examples
    --------
    >>> program_command(["timeit", "-n", "1"], module=True)[3:]
    ('-m', 'timeit', '-n', '1')
    """
    first, *arguments = program
    if module:
        return (sys.executable, *_WORKER, "-m", *program)
    if first.endswith(".py") and os.path.isfile(first):
        return (sys.executable, *_WORKER, *program)
    ours = Path(sys.executable).parent
    found = shutil.which(first) or shutil.which(first, path=str(ours))
    if found is None or first.endswith(".py"):
        what = "a file that cannot be executed" if os.path.isfile(first) else "which does not exist"
        raise LaunchError(
            f"launch: got {first!r}, {'a folder' if os.path.isdir(first) else what}; expected a script that ends in .py, or a "
            f"program on the PATH. Check the path, which starts from {os.getcwd()}, or pass -m to run a module."
        )
    if Path(found).absolute().parent != ours:
        return (found, *arguments)
    if re.fullmatch(r"python[\d.]*", Path(found).name) and arguments and (arguments[0] == "-m" or arguments[0][0] != "-"):
        return (found, *_WORKER, *arguments)
    with open(found, "rb") as file:
        is_script = re.match(rb"#!.*python", file.read(500), re.DOTALL)  # a command that pip has installed
    return (sys.executable, *_WORKER, found, *arguments) if is_script else (found, *arguments)
