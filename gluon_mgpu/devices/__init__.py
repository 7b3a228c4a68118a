"""Device names to contexts, what each device is, which GPUs are free, and copies to a device.

```
contexts   use_devices, resolve_devices, try_gpu, try_all_gpus
devices    describe_devices, DeviceInfo, usable_gpus
transfers  as_in_context; copyto is in gluon_mgpu
```
"""

from lazy_loader import attach_stub

from ..runtime import loaded as loaded

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
