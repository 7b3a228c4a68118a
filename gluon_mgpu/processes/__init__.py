"""All processes of a job: what each is, sums over them, and what each says, by MXNet's own store or by Horovod."""

from ..distributed.process import Process, this_process
from .membership import Group, any_says, apart, group, own_batches, share

__all__ = ["Group", "Process", "any_says", "apart", "group", "own_batches", "share", "this_process"]
