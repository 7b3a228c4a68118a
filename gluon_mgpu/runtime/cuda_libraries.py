"""The CUDA libraries of pip's wheels nvidia-*-cu11, which the dynamic linker does not find, loaded before MXNet."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
from contextlib import suppress
from typing import Iterable, List

from ..mxnet_internals.library import mxnet_library


def preload() -> None:
    """Load the libraries that MXNet's library lacks, if they were installed by pip. `import mxnet` reports what is missing."""
    folders, library = wheel_folders(), mxnet_library()
    if folders and library:
        with suppress(OSError):  # shown by `import mxnet`, with what to do
            load(library, folders)


def load(path: str, folders: Iterable[str], mode: int = ctypes.RTLD_LOCAL) -> None:
    """Load a library, and before it each one that the dynamic linker misses and a folder holds.

    Raises
    ------
    OSError
        The linker's error about a library that no folder holds, or that cannot be loaded.
    """
    tried = set()
    while True:
        try:
            ctypes.CDLL(path, mode=mode)
            return
        except OSError as error:
            missing = re.match(r"(\S+): cannot open shared object file", str(error))
            files = [os.path.join(folder, missing.group(1)) for folder in folders] if missing else []
            found = next((file for file in files if os.path.isfile(file) and file not in tried), None)
            if found is None:
                raise
        tried.add(found)
        load(found, folders, ctypes.RTLD_GLOBAL)


def wheel_folders() -> List[str]:
    """Return the folders with libraries in pip's wheels of CUDA."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # another module of that name
        spec = None
    packages = list(spec.submodule_search_locations or []) if spec else []
    return [folder for package in packages for folder in sorted(glob.glob(os.path.join(glob.escape(package), "*", "lib")))]
