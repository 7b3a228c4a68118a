"""What `import mxnet` lacks on today's machines, made ready before it: names that NumPy 1.24 removed, and CUDA's libraries.

`import mxnet` fails on NumPy >= 1.24 with `module 'numpy' has no attribute 'bool'`. Two things call this file: the package
itself, for programs that import `gluon_mgpu` first, and the line in `gluon_mgpu.pth`, which Python reads when it starts, for
programs that import `mxnet` first. The line costs no import of NumPy or MXNet: it only waits for the name `mxnet`. Then it also
loads the CUDA libraries that came as wheels, which the GPU wheel of MXNet would not find (see gluon_mgpu/cuda.py).
"""

from __future__ import annotations

import os
import sys
from typing import Any

ALIASES = {"bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str}


def add_aliases() -> None:
    """Give NumPy the removed names that it lacks; names that it has are left alone."""
    import numpy

    version = tuple(int(part) for part in numpy.__version__.split(".")[:2])
    if not (1, 24) <= version < (2, 0):
        return
    for name, builtin in ALIASES.items():
        vars(numpy).setdefault(name, builtin)


def load_cuda() -> None:
    """Load the CUDA libraries that MXNet's GPU wheel needs, without importing gluon_mgpu, unless `GLUON_MGPU_RUNTIME=off`.

    What is missing is left to `import mxnet`: somebody may only ask whether there is a package of that name.
    """
    import importlib.util  # not when Python starts

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gluon_mgpu", "cuda.py")
    own = importlib.util.spec_from_file_location("_gluon_mgpu_cuda", path)
    if own is None or own.loader is None or os.environ.get("GLUON_MGPU_RUNTIME", "").lower() == "off":
        return
    cuda = sys.modules[own.name] = importlib.util.module_from_spec(own)  # dataclasses look for it there
    try:
        own.loader.exec_module(cuda)
        cuda.load()
    except (ImportError, OSError):  # OSError: no such file
        pass
    finally:
        del sys.modules[own.name]


class _BeforeMXNet:
    """An import hook that finds nothing: when `mxnet` is asked for it makes things ready, and goes away."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "mxnet":
            sys.meta_path.remove(cls)
            add_aliases()
            load_cuda()


def install() -> None:
    """Wait for `import mxnet`. Called by gluon_mgpu.pth when Python starts."""
    if "mxnet" not in sys.modules and _BeforeMXNet not in sys.meta_path:
        sys.meta_path.insert(0, _BeforeMXNet)
