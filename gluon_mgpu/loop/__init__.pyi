"""The names of this room and their modules: __init__.py imports each at its first use."""

from .callbacks import FitState as FitState
from .callbacks import SaveHistory as SaveHistory
from .history import History as History
from .metric_sums import MetricSums as MetricSums
from .predict import predict_batches as predict_batches
from .trace import Trace as Trace
