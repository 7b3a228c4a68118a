"""Names that NumPy 1.24 removed and MXNet 1.9.1 still uses."""

from __future__ import annotations

ALIASES = {"bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str}


def add_aliases() -> None:
    """Add the removed names that NumPy lacks; existing names stay."""
    import numpy

    version = tuple(int(part) for part in numpy.__version__.split(".")[:2])
    if not (1, 24) <= version < (2, 0):
        return
    for name, builtin in ALIASES.items():
        vars(numpy).setdefault(name, builtin)
