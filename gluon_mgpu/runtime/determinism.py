"""Seeds for all random generators of a program, and MXNet's settings for the same bits in every run."""

from __future__ import annotations

import os
import random
from typing import Dict

import numpy as np

from ..checks import flag, whole_number
from .loaded import mxnet as mx

# MXNet reads them when it makes a convolution or another operator of cuDNN. Source: MXNet, "Environment Variables".
DETERMINISTIC: Dict[str, str] = {
    "MXNET_ENFORCE_DETERMINISM": "1",  # only deterministic algorithms; an operator without one raises
    "MXNET_CUDNN_AUTOTUNE_DEFAULT": "0",  # the fastest algorithm depends on measured times
    "MXNET_CPU_PARALLEL_RAND_COPY": "1",  # with more, which generator an operator draws from depends on threads
    "MXNET_GPU_PARALLEL_RAND_COPY": "1",  # with 4, a graph's operators draw from those that were next when it was bound
}


def seed_everything(seed: int, *, deterministic: bool = False) -> int:
    """Seed the generators of Python, NumPy and MXNet on all devices, for legacy and np arrays; return the seed.

    Call it before the network is made, and with `deterministic` before the first operation on a GPU. NumPy's generator also
    decides the order of Gluon's shuffled `DataLoader`. The loaders of this package have seeds of their own, 0 by default, and do
    not depend on it. In a job, pass the same seed in every process. On GPUs, masks of `nn.Dropout` follow the seed
    once a trainer has the network.

    Parameters
    ----------
    seed : int
        0 to 2**31 - 1.
    deterministic : bool
        Also set `MXNET_ENFORCE_DETERMINISM=1`, `MXNET_CUDNN_AUTOTUNE_DEFAULT=0`, and `MXNET_CPU_PARALLEL_RAND_COPY` and
        `MXNET_GPU_PARALLEL_RAND_COPY` to 1.

    Raises
    ------
    TrainerError
        The seed is not a whole number in this range.

    Examples
    --------
    >>> def draw():
    ...     return random.random(), np.random.rand(), mx.random.uniform(shape=1, ctx=mx.cpu(1)).asnumpy().item()
    >>> first = (seed_everything(7), draw())
    >>> first == (seed_everything(7), draw())
    True
    """
    seed = whole_number("seed_everything", "seed", seed, low=0, advice="For example, pass 0.")
    if flag("seed_everything", "deterministic", deterministic):
        os.environ.update(DETERMINISTIC)
    random.seed(seed)
    np.random.seed(seed)
    mx.random.seed(seed)  # of every device, also those that are not in use yet
    return seed
