"""MXNet, imported with what it needs and checked. Importing this module does it; rooms that use MXNet begin with that."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import numpy as np

from .. import interrupts
from ..errors import MissingExtraError
from .wait_at_exit import wait_at_exit


def load_mxnet() -> ModuleType:
    """Import `mxnet` and return it.

    Raises
    ------
    MissingExtraError
        MXNet is not installed; the message names the extras that install it.
    ImportError
        Versions of MXNet, NumPy or a system library are incompatible, or a CUDA library is missing.
    """
    if importlib.util.find_spec("mxnet") is None:
        raise MissingExtraError(
            "import gluon_mgpu: got no package mxnet; expected MXNet 1.9.1. Run pip install --no-deps mxnet==1.9.1 "
            "(Linux on x86-64), or pip install '.[cu112]' in a clone of gluon_mgpu (NVIDIA GPUs up to Ada). docs/installation.md "
            "names builds for newer GPUs, Apple silicon and other systems."
        )
    try:
        interrupts.begin_imports()
        mxnet = importlib.import_module("mxnet")
    except OSError as error:  # the dynamic linker: libgomp.so.1, libcuda.so.1, ...
        raise ImportError(
            f"import gluon_mgpu: got {error}; expected the system libraries that MXNet's wheel is linked to. On Debian and "
            "Ubuntu, run apt-get install libgomp1 libquadmath0 zlib1g. libcuda.so.1 is the NVIDIA driver's (in a container: "
            "docker run --gpus all); on the CPU, pip uninstall mxnet-cu112 and pip install --no-deps mxnet==1.9.1. CUDA's other "
            "libraries come with pip install '.[cu112]' in a clone of gluon_mgpu; they are found unless GLUON_MGPU_RUNTIME=off."
        ) from error
    except (AttributeError, ValueError) as error:  # np.long, for example: MXNet imports SciPy if it is there
        if isinstance(error, ValueError) and "numpy" not in str(error):
            raise
        raise ImportError(
            f"import gluon_mgpu: got {error}, from a package that does not fit numpy {np.__version__}; expected one that does. "
            "With NumPy 1, run pip install 'scipy<1.16'; with NumPy 2, run pip install --upgrade scipy."
        ) from error
    finally:
        interrupts.end_imports()
    if not mxnet.__version__.startswith(("1.8.", "1.9.", "2.")):
        raise ImportError(
            f"import gluon_mgpu: got mxnet {mxnet.__version__}; expected MXNet 1.9.1, whose Gluon this toolkit is written "
            "for. Run pip install 'mxnet==1.9.1'."
        )
    return mxnet


wait_at_exit(load_mxnet())
import mxnet as mxnet  # noqa: E402
