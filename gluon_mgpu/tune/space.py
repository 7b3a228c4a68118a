"""Spaces of hyper-parameters: read from text, and sampled."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Sequence, Tuple

from ..errors import DataError

KINDS = ("log", "uniform", "int", "choice")
_DIGITS = 4  # of sampled numbers, so that commands are readable

Options = Dict[str, Any]


@dataclass(frozen=True)
class Values:
    """The values of one hyper-parameter: an interval, or a list of choices.

    Attributes
    ----------
    kind : str
        "log" (uniform in the logarithm), "uniform", "int" (whole numbers, both ends included) or "choice".
    low, high : float
        The ends of an interval.
    choices : tuple
        Numbers or texts.
    """

    kind: str
    low: float = math.nan
    high: float = math.nan
    choices: Tuple[Any, ...] = ()

    def sample(self, generator: random.Random) -> Any:
        """Return a value."""
        if self.kind == "choice":
            return generator.choice(self.choices)
        if self.kind == "int":
            return generator.randint(int(self.low), int(self.high))
        if self.kind == "log":
            return self.clipped(math.exp(generator.uniform(math.log(self.low), math.log(self.high))))
        return self.clipped(generator.uniform(self.low, self.high))

    def clipped(self, value: Any) -> Any:
        """Return a value inside the interval, with at most four digits; choices stay."""
        if self.kind == "choice":
            return value
        value = min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)
        return round(value) if self.kind == "int" else value


def read_space(texts: Sequence[str]) -> Dict[str, Values]:
    """Return a space from texts such as `lr=log:1e-4:1e-1 batch-size=choice:64,128`.

    Raises
    ------
    DataError
        A text has another form, or names an option twice.

    Examples
    --------
    >>> read_space(["lr=log:1e-4:1e-1 batch-size=choice:64,128"])["batch-size"].choices
    (64, 128)
    """
    space: Dict[str, Values] = {}
    for text in " ".join(texts).split():
        name, _, form = text.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if not name or name in space:
            raise DataError(f"search: got {text!r} in --space; expected each option once, as in lr=log:1e-4:1e-1. Correct it.")
        space[name] = _read_values(text, form)
    return space


def _read_values(text: str, form: str) -> Values:
    kind, _, rest = form.partition(":")
    if kind == "choice" and rest and all(rest.split(",")):
        return Values("choice", choices=tuple(map(_number_or_text, rest.split(","))))
    ends = [_number_or_text(end) for end in rest.split(":")]
    whole = kind != "int" or all(isinstance(end, int) for end in ends)
    numbers = all(isinstance(end, (int, float)) and math.isfinite(end) for end in ends)
    if kind in KINDS and kind != "choice" and len(ends) == 2 and numbers and whole:
        low, high = ends
        if low < high and (kind != "log" or low > 0):
            return Values(kind, low, high)
    raise DataError(
        f"search: got {text!r} in --space; expected NAME=log:LOW:HIGH with 0 < LOW < HIGH, NAME=uniform:LOW:HIGH, "
        "NAME=int:LOW:HIGH, or NAME=choice:A,B,C. Correct it."
    )


def _number_or_text(text: str) -> Any:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def sample_trials(space: Dict[str, Values], num_trials: int, seed: int) -> List[Options]:
    """Return the hyper-parameters of each trial. The same seed gives the same ones, and more trials keep the earlier ones.

    Examples
    --------
    >>> space = read_space(["lr=log:1e-4:1e-1", "cell=choice:gru,lstm"])
    >>> sample_trials(space, 3, seed=1) == sample_trials(space, 5, seed=1)[:3]
    True
    """
    return [
        {name: values.sample(random.Random(f"{seed}/{name}/{number}")) for name, values in space.items()}
        for number in range(num_trials)
    ]


def arguments_of(options: Options) -> List[str]:
    """Return hyper-parameters as arguments of a command.

    Examples
    --------
    >>> arguments_of({"lr": 0.01, "cell": "gru"})
    ['--lr', '0.01', '--cell', 'gru']
    """
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
