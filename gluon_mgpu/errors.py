"""What can go wrong: each error subclasses the builtin that a caller would expect to catch."""

from __future__ import annotations

from typing import Any, List, Optional

_LONGEST = 600  # characters of a message: what is longer loses its middle


class _OneLineError(Exception):
    """An error whose message is one line of at most 600 characters, whatever a value in it looks like when it is printed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*(one_line(arg) if isinstance(arg, str) else arg for arg in args), **options)


def one_line(text: str) -> str:
    """Return a message as one line of at most 600 characters."""
    text = " ".join(text.splitlines()) if len(text.splitlines()) > 1 else text
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2 - 5]} ... {text[5 - _LONGEST // 2 :]}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, where MXNet gives the reason; the class's name if the message is empty."""
    return _lines(error)[-1]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the class's name if the message is empty."""
    return _lines(error)[0]


def _lines(error: BaseException) -> List[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


class DeviceError(_OneLineError, ValueError):
    """A device was asked for that is malformed, repeated, or not there."""


class ShardError(_OneLineError, ValueError):
    """A batch cannot be split, or shards cannot be put together, as asked."""


class NestedError(ShardError, TypeError):
    """Something in nested data is neither an array nor a container of arrays."""


class TrainerError(_OneLineError, ValueError):
    """A Trainer was given something it cannot train with, or called out of order."""


class StaleGradientError(_OneLineError, UserWarning):
    """A parameter got no gradient on any device since the last step. Gluon raises a bare `UserWarning` there."""


class StateError(_OneLineError, ValueError):
    """A file of trainer states does not belong to this network, or is not one."""


class SaveError(_OneLineError, OSError):
    """A checkpoint or another file of a run cannot be written: no room, no permission, or another run uses the folder."""

    def __init__(self, message: str, number: Optional[int] = None) -> None:
        super().__init__(message)  # with the number, OSError would say it in front
        self.errno = number


class DataError(_OneLineError, ValueError):
    """A data file or array is damaged, foreign, or does not fit its partner."""


class StepError(_OneLineError, RuntimeError):
    """A device failed while a batch was on its way; the message names the step."""


class NonFiniteLossError(_OneLineError, FloatingPointError):
    """The loss became NaN or infinite; the message names the step and the device."""


class MissingExtraError(_OneLineError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""


class ProcessError(_OneLineError, RuntimeError):
    """The processes of a job cannot work together."""
