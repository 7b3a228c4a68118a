"""The processes of a job: which one this is, collectives over all of them, and the launcher that starts them.

```
this process  this_process, Process, LaunchError
collectives   group, Group, any_process, without_group
data          process_shard, own_batches
```
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
