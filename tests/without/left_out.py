"""Leaves packages out of `import mxnet`, which loads them where they are installed, and needs a second for that."""

import importlib
import os
import sys


def load(name):
    """Replace the stand-in of a package by the package, unless MXNet is being imported: MXNet then does without."""
    if getattr(getattr(sys.modules.get("mxnet"), "__spec__", None), "_initializing", False):
        raise ModuleNotFoundError(f"{name} is left out of import mxnet: see tests/__init__.py", name=name)
    del sys.modules[name]
    path = sys.path[:]
    sys.path[:] = [folder for folder in path if folder != os.path.dirname(__file__)]
    try:
        importlib.import_module(name)
    finally:
        sys.path[:] = path
