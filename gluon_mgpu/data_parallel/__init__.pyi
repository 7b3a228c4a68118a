"""The names of this room and their modules: __init__.py imports each at its first use."""

from .batchnorm import SyncBatchNorm as SyncBatchNorm
from .batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
from .batchnorm import forward_shards as forward_shards
from .batchnorm import revert_sync_batchnorm as revert_sync_batchnorm
from .sharding import plan_shards as plan_shards
from .sharding import split_data as split_data
from .step import Batch as Batch
