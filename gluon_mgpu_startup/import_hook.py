"""Make `import mxnet` work on current machines: restore names that NumPy 1.24 removed, and load CUDA's libraries.

`import mxnet` fails on NumPy >= 1.24 with `module 'numpy' has no attribute 'bool'`. Programs that import `gluon_mgpu` first need
nothing else. For programs that import `mxnet` first, Python runs the line in `gluon_mgpu.pth` when it starts. That line imports
neither NumPy nor MXNet: it waits for the name `mxnet`. Then the hook also loads the CUDA libraries that were installed as wheels,
which MXNet's GPU wheel does not find (see gluon_mgpu/runtime/cuda_libraries.py).
"""

from __future__ import annotations

import os
import sys
from typing import Any

_RUNTIME = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "gluon_mgpu", "runtime")


def prepare_numpy() -> None:
    """Add the names that NumPy removed, without importing gluon_mgpu."""
    _run("numpy_names", "add_aliases")


def load_cuda() -> None:
    """Load the CUDA libraries that MXNet's GPU wheel needs, without importing gluon_mgpu, unless `GLUON_MGPU_RUNTIME=off`.

    It raises nothing: the program may only check whether a package mxnet exists. `import mxnet` reports missing libraries.
    """
    if os.environ.get("GLUON_MGPU_RUNTIME", "").lower() != "off":
        try:  # noqa: SIM105  (contextlib is not imported when Python starts)
            _run("cuda_libraries", "load")
        except (ImportError, OSError):  # OSError: no such file
            pass


def _run(name: str, function: str) -> None:
    """Call a function of a module in gluon_mgpu/runtime, read from its file."""
    import importlib.util  # not when Python starts

    own = importlib.util.spec_from_file_location(f"_gluon_mgpu_{name}", os.path.join(_RUNTIME, f"{name}.py"))
    if own is None or own.loader is None:
        return
    module = sys.modules[own.name] = importlib.util.module_from_spec(own)  # dataclasses look the module up there
    try:
        own.loader.exec_module(module)
        getattr(module, function)()
    finally:
        del sys.modules[own.name]


class _BeforeMXNet:
    """An import hook that finds no module. When `mxnet` is imported, it prepares the import and removes itself."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "mxnet":
            sys.meta_path.remove(cls)
            prepare_numpy()
            load_cuda()


def install() -> None:
    """Wait for `import mxnet`. Called by gluon_mgpu.pth when Python starts."""
    if "mxnet" not in sys.modules and _BeforeMXNet not in sys.meta_path:
        sys.meta_path.insert(0, _BeforeMXNet)
