"""Backends that sum gradients: MXNet's stores and Horovod."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from importlib import metadata
from typing import List, Sequence, Tuple

from ..errors import first_line
from .findings import Problem

# Source: MXNet 1.9.1, src/kvstore/kvstore.cc, KVStore::Create.
_STORES = {
    "local": ("", "one process: sums on the CPU"),
    "device": ("", "one process: sums on the devices"),
    "nccl": ("NCCL", "one process: sums on NVIDIA GPUs, by NCCL"),
    "dist_sync": ("DIST_KVSTORE", "several processes: sums by parameter servers"),
    "dist_device_sync": ("DIST_KVSTORE", "several processes: on each machine's devices, then by servers"),
    "dist_async": ("DIST_KVSTORE", "several processes: servers that do not wait for slow workers"),
}
_PARTS = ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl")


@dataclass(frozen=True)
class Store:
    """A kvstore type.

    Attributes
    ----------
    name : str
    there : bool
    what : str
        Its description, or the part that this build lacks.
    """

    name: str
    there: bool
    what: str


@dataclass(frozen=True)
class Horovod:
    """Horovod as installed.

    Attributes
    ----------
    version : str
        "" if it is not installed.
    why_not : str
        Why `horovod.mxnet` cannot be or was not imported; "" otherwise, and without Horovod.
    parts : tuple of str
        The parts that it was built with: `mpi`, `gloo`, `nccl`, ...
    """

    version: str
    why_not: str
    parts: Tuple[str, ...]

    def described(self) -> str:
        """Return a description."""
        if not self.version:
            return f"not checked: {self.why_not}" if self.why_not else "not installed"
        if self.why_not:
            return f"{self.version}, which does not work with this MXNet: {self.why_not}"
        return f"{self.version}, built with {', '.join(self.parts) or 'none of MPI, Gloo and NCCL'}"


def stores_of(features: Sequence[str]) -> List[Store]:
    """Return the kvstore types of MXNet, and whether a build with these features has them.

    Examples
    --------
    >>> [store.name for store in stores_of(["DIST_KVSTORE"]) if not store.there]
    ['nccl']
    """
    found = []
    for name, (needed, what) in _STORES.items():
        there = not needed or needed in features
        found.append(Store(name, there, what if there else f"this build lacks {needed}"))
    return found


def inspect_horovod() -> Horovod:
    """Return the installed Horovod; this imports it, but connects to no process."""
    if importlib.util.find_spec("horovod") is None:
        return Horovod("", "", ())
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    try:
        hvd = importlib.import_module("horovod.mxnet")
    except Exception as error:  # its C++ library may lack symbols of this MXNet
        return Horovod(version, first_line(error), ())
    built = [(part, getattr(hvd, f"{part}_built", None)) for part in _PARTS]
    return Horovod(version, "", tuple(part for part, ask in built if ask is not None and ask()))


def check_horovod(horovod: Horovod) -> List[Problem]:
    """Return problems with Horovod, if it is installed."""
    if not horovod.version:
        return []
    if horovod.why_not:
        what = f"Horovod {horovod.version} does not work with this MXNet: {horovod.why_not}"
        to_do = "Build horovod 0.28.1 for this MXNet with HOROVOD_WITH_MXNET=1, or launch with --backend dist_sync."
        return [Problem("Horovod", what, to_do)]
    if not {"mpi", "gloo"} & set(horovod.parts):
        what = f"Horovod {horovod.version} was built with neither MPI nor Gloo, which its processes use to find each other."
        return [Problem("Horovod", what, "Build it again with HOROVOD_WITH_GLOO=1.")]
    return []
