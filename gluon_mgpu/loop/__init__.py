"""Epochs: fit, evaluate, predict, callbacks, resume. What is rarer than the names of `gluon_mgpu`:

```
metrics    MetricSums
history    History, SaveHistory
callbacks  FitState
outputs    predict_batches
time       Trace
```
"""

from lazy_loader import attach_stub

from ..runtime import loaded as loaded

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
