"""Device names to contexts, what each device is, and which GPUs are free.

```
contexts  use_devices, resolve_devices, try_gpu, try_all_gpus
devices   describe_devices, DeviceInfo, usable_gpus
```
"""

from lazy_loader import attach_stub

from ..runtime import loaded as loaded

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
