"""Device names to contexts, what each device is, and which GPUs are free."""

from .describe import DeviceInfo, describe_devices
from .mxnet_gpus import usable_gpus
from .select import resolve_devices, try_all_gpus, try_gpu, use_devices

__all__ = ["DeviceInfo", "describe_devices", "resolve_devices", "try_all_gpus", "try_gpu", "usable_gpus", "use_devices"]
