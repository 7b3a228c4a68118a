"""The names of this room and their modules: __init__.py imports each at its first use."""

from .describe import DeviceInfo as DeviceInfo
from .describe import describe_devices as describe_devices
from .mxnet_gpus import usable_gpus as usable_gpus
from .select import resolve_devices as resolve_devices
from .select import try_all_gpus as try_all_gpus
from .select import try_gpu as try_gpu
from .select import use_devices as use_devices
from .transfer import as_in_context as as_in_context
