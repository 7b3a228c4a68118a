"""What can go wrong: each error subclasses the builtin that a caller would expect to catch."""

from __future__ import annotations


class DeviceError(ValueError):
    """A device was asked for that is malformed, repeated, or not there."""


class ShardError(ValueError):
    """A batch cannot be split, or shards cannot be put together, as asked."""


class TrainerError(ValueError):
    """A Trainer was given something it cannot train with, or called out of order."""


class StaleGradientError(UserWarning):
    """A parameter got no gradient on any device since the last step. Gluon raises a bare `UserWarning` there."""


class StateError(ValueError):
    """A file of trainer states does not belong to this network, or is not one."""


class DataError(ValueError):
    """A data file or array is damaged, foreign, or does not fit its partner."""


class StepError(RuntimeError):
    """A device failed while a batch was on its way; the message names the step."""


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or infinite; the message names the step and the device."""


class MissingExtraError(ImportError):
    """An optional package is needed; the message names the extra that installs it."""


class ProcessError(RuntimeError):
    """The processes of a job cannot work together."""
