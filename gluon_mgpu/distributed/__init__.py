"""The processes of a job: which one this is, collectives over all of them, and the launcher that starts them."""

from .membership import Group, any_says, apart, group, own_batches, share
from .process import LaunchError, Process, this_process

__all__ = ["Group", "LaunchError", "Process", "any_says", "apart", "group", "own_batches", "share", "this_process"]
