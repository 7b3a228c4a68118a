"""Measure and choose.

```
batch size       find_batch_size
learning rate    LearningRateFinder
trials with Ray  ReportToTune, trial_folder
```
"""

from lazy_loader import attach_stub

from ..runtime import loaded as loaded

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
