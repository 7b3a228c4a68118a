"""The names of this room and their modules: __init__.py imports each at its first use."""

from .batch_size_search import find_batch_size as find_batch_size
from .learning_rate_finder import LearningRateFinder as LearningRateFinder
from .ray_tune import ReportToTune as ReportToTune
from .ray_tune import trial_folder as trial_folder
