"""What `mxnet.optimizer.Optimizer` knows and does not offer.

Source: MXNet 1.9.1, python/mxnet/optimizer/optimizer.py.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Dict

from mxnet import optimizer as opt

# Methods of an optimizer, (indices) -> one rate or decay for each parameter, with its lr_mult or wd_mult: the schedule's for the
# number of updates. As attrgetters, because each step asks for every slab.
learning_rates = attrgetter("_get_lrs")
weight_decays = attrgetter("_get_wds")
COUNTS = ("_all_index_update_counts", "_index_update_count")  # attributes: updates by device number and parameter


def use_counts(optimizer: opt.Optimizer, device_id: int, counts: Dict[int, int]) -> None:
    """Let an optimizer count the updates on a device in a dict of ours: cpu(0) and gpu(0) would share one."""
    optimizer._all_index_update_counts = {device_id: counts}
