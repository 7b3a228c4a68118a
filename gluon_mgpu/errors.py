"""The exceptions: each subclasses the builtin that a caller would expect to catch."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

_LONGEST = 600  # characters of a message: a longer one loses its middle


class _OneLineError(Exception):
    """An error whose message is one line of at most 600 characters, whatever values it shows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*(one_line(arg) if isinstance(arg, str) else arg for arg in args), **options)


def one_line(text: str) -> str:
    """Return a message as one line of at most 600 characters."""
    text = " ".join(text.splitlines())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2 - 5]} ... {text[5 - _LONGEST // 2 :]}"


def last_line(error: BaseException) -> str:
    """Return the line of an error's message in which MXNet gives the reason, or the last one; its class if there is none.

    Examples
    --------
    >>> last_line(ValueError("Traceback\\nMXNetError: no such operator\\ncontext: cpu"))
    'MXNetError: no such operator'
    """
    lines = _lines(error)
    return next((line for line in reversed(lines) if line.startswith("MXNetError: ")), lines[-1])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the class's name if the message is empty."""
    return _lines(error)[0]


def _lines(error: BaseException) -> List[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


class DeviceError(_OneLineError, ValueError):
    """A requested device is malformed, repeated, or does not exist."""


class ShardError(_OneLineError, ValueError):
    """A batch cannot be split, or shards cannot be gathered, as requested."""


class NestedError(ShardError, TypeError):
    """Something in nested data is neither an array nor a container of arrays."""


class TrainerError(_OneLineError, ValueError):
    """A Trainer got an argument that it cannot train with, or its methods were called in the wrong order."""


class ModesError(TrainerError):
    """Two modes exclude each other: `modes` names them as docs/limitations.md does."""

    def __init__(self, message: str, modes: Tuple[str, str]) -> None:
        super().__init__(message)
        self.modes = modes

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.modes)


class StaleGradientError(_OneLineError, UserWarning):
    """A parameter got no gradient on any device since the last step. Gluon raises a plain `UserWarning` for this."""


class StateError(_OneLineError, ValueError):
    """States or a checkpoint cannot be saved or read: damaged, of another network or optimizer, or in another run's folder."""


class SaveError(_OneLineError, OSError):
    """A checkpoint or another file of a run cannot be written: full disk, no permission, or another run uses the folder."""

    def __init__(self, message: str, number: Optional[int] = None) -> None:
        super().__init__(message)  # with the number, OSError would put it in front of the message
        self.errno = number


class DataError(_OneLineError, ValueError):
    """A data file or array is damaged, has another format, or does not match its partner."""


class StepError(_OneLineError, RuntimeError):
    """A network or a device failed while it computed a batch; the message names the step."""


class ReplicaError(_OneLineError, RuntimeError):
    """The replicas of a network hold other bits: a device computes or stores wrongly."""


class NonFiniteLossError(_OneLineError, FloatingPointError):
    """The loss became NaN or infinite; the message names the step and the device."""


class MissingExtraError(_OneLineError, ImportError):
    """An optional package is missing; the message names the extra that installs it."""


class ProcessError(_OneLineError, RuntimeError):
    """The processes of a job cannot work together."""
