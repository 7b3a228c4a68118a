"""The names of this room and their modules: __init__.py imports each at its first use. The launcher needs no MXNet."""

from .membership import Group as Group
from .membership import any_process as any_process
from .membership import group as group
from .membership import own_batches as own_batches
from .membership import process_shard as process_shard
from .membership import without_group as without_group
from .process import LaunchError as LaunchError
from .process import Process as Process
from .process import this_process as this_process
