"""What is wrong, and what to do about it; a look that fails is a finding, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, List, Tuple, TypeVar

from ..errors import first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes
    ----------
    check : str
        Which check found it: `packages`, `GPUs`, `disk space`, ...
    what : str
    to_do : str
    stops_training : bool
        Whether nothing can be trained on the devices that were asked for until it is mended.
    """

    check: str
    what: str
    to_do: str
    stops_training: bool = False


class Examination:
    """Looks and checks, one after the other, and what they find; one that fails is a finding, and the others are still made.

    Attributes
    ----------
    findings : list of Problem
    """

    def __init__(self) -> None:
        self.findings: List[Problem] = []

    def look(self, check: str, or_else: T, look: Callable[..., T], *arguments: Any) -> T:
        """Return what `look(*arguments)` returns; where it raises, `or_else`."""
        try:
            return look(*arguments)
        except Exception as error:  # whatever it is: the doctor goes on
            what = f"The check of {check} failed: {type(error).__name__}: {first_line(error)}"
            self.findings.append(Problem(check, what, "What it would have told is not known. Please report it."))
            return or_else

    def judge(self, check: str, judge: Callable[..., List[Problem]], *arguments: Any) -> None:
        """Add what `judge(*arguments)` finds."""
        found: List[Problem] = []
        self.findings += self.look(check, found, judge, *arguments)


def describe_error(error: BaseException) -> Tuple[str, str]:
    """Return what an error in the house's form says, in two parts: what was got, and what is needed and to be done.

    Examples
    --------
    >>> describe_error(ValueError("fit: got 0 epochs; expected 1 or more. Pass epochs=1."))
    ('fit: got 0 epochs', 'Expected 1 or more. Pass epochs=1.')
    """
    what, found, to_do = str(error).strip().partition("; expected ")
    return what or type(error).__name__, f"Expected {to_do}" if found else "Do what the message says."
