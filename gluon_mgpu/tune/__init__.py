"""Search for hyper-parameters with Ray Tune: the bridge between its trials and `fit`."""

from .report import ReportToTune, trial_folder

__all__ = ["ReportToTune", "trial_folder"]
