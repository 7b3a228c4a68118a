"""What sums gradients: MXNet's stores, and Horovod."""

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
    "dist_async": ("DIST_KVSTORE", "several processes: servers that wait for nobody"),
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
        What it does, or which part this build lacks.
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
        Empty where it is not installed.
    why_not : str
        Why `horovod.mxnet` cannot be imported, or was not; empty where it can, or where there is no Horovod.
    parts : tuple of str
        What it was built with: `mpi`, `gloo`, `nccl`, ...
    """

    version: str
    why_not: str
    parts: Tuple[str, ...]

    def described(self) -> str:
        """Return it in words."""
        if not self.version:
            return f"not looked for: {self.why_not}" if self.why_not else "not installed"
        if self.why_not:
            return f"{self.version}, which does not work with MXNet here: {self.why_not}"
        return f"{self.version}, built with {', '.join(self.parts) or 'none of MPI, Gloo and NCCL'}"


def stores_of(features: Sequence[str]) -> List[Store]:
    """Return the kvstore types of MXNet, and which of them a build with these features has.

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


def look_at_horovod() -> Horovod:
    """Return what Horovod is here; it is imported for that, and joins nobody."""
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
    """Return what is wrong with Horovod, where it is installed."""
    if not horovod.version:
        return []
    if horovod.why_not:
        what = f"Horovod {horovod.version} does not work with MXNet here: {horovod.why_not}"
        to_do = "Build horovod 0.28.1 for this MXNet, with HOROVOD_WITH_MXNET=1; or launch without it, by MXNet's own dist_sync."
        return [Problem("Horovod", what, to_do)]
    if not {"mpi", "gloo"} & set(horovod.parts):
        what = f"Horovod {horovod.version} was built with neither MPI nor Gloo, by which its processes find each other."
        return [Problem("Horovod", what, "Build it again with HOROVOD_WITH_GLOO=1.")]
    return []
