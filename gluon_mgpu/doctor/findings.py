"""Problems and how to fix them; a check that fails is itself reported as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, List, Tuple, TypeVar

from ..errors import first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """A problem that the doctor has found.

    Attributes
    ----------
    check : str
        The check that found it: `packages`, `GPUs`, `disk space`, ...
    what : str
        The problem.
    to_do : str
        How to fix it. If that takes several lines, the first is a summary.
    stops_training : bool
        Whether it prevents training on the requested devices.
    """

    check: str
    what: str
    to_do: str
    stops_training: bool = False


class Examination:
    """Runs checks one after the other and collects their findings; a check that fails is a finding, and the others still run.

    Attributes
    ----------
    findings : list of Problem
    """

    def __init__(self) -> None:
        self.findings: List[Problem] = []

    def run(self, check: str, default: Any, inspect: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `inspect(*arguments)`; if it raises, add a finding and return `default`."""
        try:
            return inspect(*arguments)
        except Exception as error:  # any error: the doctor continues with the next check
            what = f"The check of {check} failed: {type(error).__name__}: {first_line(error)}"
            self.findings.append(Problem(check, what, "Its result is unknown. Please report this error."))
            return default  # type: ignore[no-any-return]

    def check(self, check: str, find: Callable[..., List[Problem]], *arguments: Any) -> None:
        """Add the problems that `find(*arguments)` returns."""
        self.findings += self.run(check, [], find, *arguments)


def describe_error(message: str, otherwise: str = "Follow the message.") -> Tuple[str, str]:
    """Split an error of this package into two parts: the value it got, and the expected condition with the advice.

    `otherwise` is the advice for a message that names no condition.

    Examples
    --------
    >>> describe_error("fit: got 0 epochs; expected 1 or more. Pass epochs=1.")
    ('fit: got 0 epochs', 'Expected 1 or more. Pass epochs=1.')
    """
    what, found, to_do = message.partition("; expected ")
    return what, f"Expected {to_do}" if found else otherwise
