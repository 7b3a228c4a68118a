"""What Gluon's DataLoader knows and does not offer: the samplers in it.

Source: MXNet 1.9.1, python/mxnet/gluon/data/dataloader.py, sampler.py.
"""

from __future__ import annotations

from typing import Any, Tuple


def samplers_of(loader: Any) -> Tuple[Any, Any]:
    """Return the sampler of batches and that of single examples. A data iterator that is not a DataLoader has None."""
    sampler = getattr(loader, "_batch_sampler", None)
    return sampler, getattr(sampler, "_sampler", None)


def keeps_last_batch(loader: Any) -> bool:
    """Return whether a DataLoader keeps the last examples of an epoch for the next one."""
    return getattr(samplers_of(loader)[0], "_last_batch", "") == "rollover"


def shuffles_in_cpp(loader: Any) -> bool:
    """Return whether this is a DataLoader of MXNet 2 that shuffles in C++."""
    return getattr(loader, "_mx_iter", None) is not None
