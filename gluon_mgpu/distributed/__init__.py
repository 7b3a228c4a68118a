"""The processes of a job: which one this is, collectives over all of them, and the launcher that starts them."""

from .membership import Group, any_process, group, own_batches, process_shard, without_group
from .process import LaunchError, Process, this_process

__all__ = [
    "Group",
    "LaunchError",
    "Process",
    "any_process",
    "group",
    "own_batches",
    "process_shard",
    "without_group",
    "this_process",
]
