"""One batch on all devices: split, forward, backward, gather. What is rarer than the names of `gluon_mgpu`:

```
splits           plan_shards, split_data, Batch
BatchNorm        convert_sync_batchnorm, revert_sync_batchnorm, SyncBatchNorm, forward_shards
```
"""

from lazy_loader import attach_stub

from ..runtime import loaded as loaded

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
