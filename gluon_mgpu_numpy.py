"""The names that NumPy 1.24 removed and MXNet 1.9.1 still uses, put back before MXNet is imported.

`import mxnet` fails on NumPy >= 1.24 with `module 'numpy' has no attribute 'bool'`. Two things call this file: the package
itself, for programs that import `gluon_mgpu` first, and the line in `gluon_mgpu.pth`, which Python reads when it starts, for
programs that import `mxnet` first. The line costs no import of NumPy or MXNet: it only waits for the name `mxnet`.
"""

from __future__ import annotations

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


class _BeforeMXNet:
    """An import hook that finds nothing: it adds the aliases when `mxnet` is asked for, and goes away."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "mxnet":
            sys.meta_path.remove(cls)
            add_aliases()


def install() -> None:
    """Wait for `import mxnet`. Called by gluon_mgpu.pth when Python starts."""
    if "mxnet" not in sys.modules and _BeforeMXNet not in sys.meta_path:
        sys.meta_path.insert(0, _BeforeMXNet)
