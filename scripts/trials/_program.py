"""One program: made at random, run on several devices and on one, compared, and made shorter where they differ."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from _statements import Group, Statement
from _worlds import Ours, Plain, Setting, World, net_params

BOUND = 1e-5  # of weights around 1; larger ones in proportion
ROUNDING = 30  # differences up to this many times the effect of another order of summation are not findings
_MOST_CPU_S = 6.0  # to make a finding shorter
_HOUSE_FORM = re.compile(r"^[\w. \-\[\]']+: got .+; (expected|expected) .+[.:] .+")
_OURS = tuple(value for value in vars(mgpu.errors).values() if isinstance(value, type) and issubclass(value, Exception))


@dataclass(frozen=True)
class Program:
    """A setting and what is done in it."""

    setting: Setting
    statements: Tuple[Statement, ...]

    def __str__(self) -> str:
        return "\n".join([f"  {self.setting}", *(f"  {statement}" for statement in self.statements)])


@dataclass(frozen=True)
class Outcome:
    """The result of a program: `found` for an error, `refused` for a permitted rejection with its reason."""

    found: str = ""
    refused: str = ""
    skipped: str = ""  # plain Gluon itself cannot run it

    @property
    def kind(self) -> str:
        """What the finding is, without its figures."""
        return self.found.split(":")[0]

    def __str__(self) -> str:
        reasons = [f"{name}: {value}" for name, value in vars(self).items() if value]
        return reasons[0] if reasons else "the same"


def outcome_of(program: Program) -> Outcome:
    """Run a program in both worlds and compare them."""
    (mx.npx.set_np if program.setting.arrays == "np" else mx.npx.reset_np)()
    try:
        with tempfile.TemporaryDirectory(prefix="program-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compared(program, Path(folder))
    finally:
        mx.npx.reset_np()


@dataclass(frozen=True)
class PlainRun:
    """The plain world after a program.

    Attributes
    ----------
    world : Plain
    notes : list of list of str
        After each statement, the reasons for which several devices may refuse.
    stopped : int
        The statement that Gluon refuses, as gradients are stale; the number of statements where it refuses none.
    skipped : str
        Why Gluon cannot run the program.
    """

    world: Plain
    notes: List[List[str]]
    stopped: int
    skipped: str = ""

    def has_nan(self) -> bool:
        """Return whether weights have become NaN."""
        return any(np.isnan(one).any() for _, one in self.world.weights())


@dataclass(frozen=True)
class Failure:
    """An error of ours: its class and text, whether it has the house's form, and the statement that raised it."""

    kind: str
    text: str
    has_form: bool
    place: int


def run_plain(program: Program, folder: Path) -> PlainRun:
    """Run a program on one device."""
    plain = Plain(program.setting, folder)
    notes: List[List[str]] = []
    for i, statement in enumerate(program.statements):
        try:
            statement.plain(plain)
        except UserWarning:
            return PlainRun(plain, [*notes, list(plain.notes)], i)
        except (mx.MXNetError, ValueError, TypeError, AssertionError, NotImplementedError, AttributeError) as error:
            return PlainRun(plain, notes, i, f"{type(error).__name__}: {str(error)[:60]}".splitlines()[0])
        notes.append(list(plain.notes))
    mx.nd.waitall()
    return PlainRun(plain, notes, len(program.statements))


def run_ours(program: Program, ours: Ours) -> Optional[Failure]:
    """Run a program on several devices; return how it failed."""
    for place, statement in enumerate(program.statements):
        try:
            statement.ours(ours)
            if place + 1 == len(program.statements):
                mx.nd.waitall()
        except Exception as error:
            return failure_of(error, place)
    return None


def failure_of(error: Exception, place: int) -> Failure:
    """Return an error as a value."""
    has_form = isinstance(error, _OURS) and _HOUSE_FORM.match(str(error)) is not None and "\n" not in str(error)
    return Failure(type(error).__name__, str(error)[:400], has_form, place)


def _compared(program: Program, folder: Path) -> Outcome:
    plain = run_plain(program, folder)
    if plain.skipped:
        return Outcome(skipped=plain.skipped)
    try:
        ours = Ours(program.setting, [mx.cpu(j) for j in range(program.setting.num_devices)], folder)
    except Exception as error:
        return judged(failure_of(error, -1), program, plain)
    done = Program(program.setting, program.statements[: plain.stopped + 1])
    failure = run_ours(done, ours)
    if failure is not None:
        return judged(failure, program, plain)
    if plain.stopped < len(program.statements):
        return Outcome(f"no error: {program.statements[plain.stopped]} continues where Gluon reports stale gradients")
    difference = _difference(ours, plain.world)
    if difference.startswith(("weights", "outputs")):
        if noise_of(program, plain.world, folder) * ROUNDING > _largest(ours, plain.world):
            return Outcome(skipped="it amplifies rounding")
        if not _near_world(_again(program, folder, compiled=True), plain.world):
            return Outcome(skipped="MXNet's compiled graphs also give one device other gradients")
    return Outcome(difference)


def judged(failure: Failure, program: Program, plain: PlainRun) -> Outcome:
    """Return what an error of ours means."""
    statement = program.statements[failure.place] if failure.place >= 0 else "the trainers"
    where = f"{failure.kind}: {failure.text}\n    at statement {failure.place}: {statement}"
    if not failure.has_form:
        return Outcome(f"foreign error: {where}")
    if failure.kind == "NonFiniteLossError" and plain.has_nan():
        return Outcome(refused="NaN, as in Gluon")
    if failure.place == plain.stopped:
        stale = failure.kind == "StaleGradientError"
        return Outcome(refused="stale gradients, as in Gluon" if stale else f"stale gradients, as {failure.kind}")
    notes = plain.notes[failure.place] if 0 <= failure.place < len(plain.notes) else []
    return Outcome(refused=notes[-1]) if notes else Outcome(f"refused: {where}")


def _difference(ours: Ours, plain: Plain) -> str:
    apart = apart_in(ours)
    if apart and ours.trainer_options.get("every", 1) == 1:
        return f"replicas differ: {apart}"
    return "" if ours.drew_noise else difference_of(ours.outputs, [value for _, value in ours.weights()], plain)


def difference_of(outputs: Sequence[np.ndarray], weights: Sequence[np.ndarray], plain: Plain) -> str:
    """Return where outputs or weights differ from those of the plain world by more than rounding."""
    for i, (mine, right) in enumerate(zip(outputs, plain.outputs)):
        if not near(mine, right):
            return f"outputs differ: number {i} by {furthest(mine, right)}"
    for mine, (name, right) in zip(weights, plain.weights()):
        if not near(mine, right):
            return f"weights differ: {name} by {furthest(mine, right):.3g} of {np.abs(right).max():.3g}"
    return ""


def near(mine: np.ndarray, right: np.ndarray) -> bool:
    """Return whether two arrays are equal except for rounding."""
    return bool(furthest(mine, right) <= BOUND * max(1.0, float(np.abs(right).max(initial=0))))


def furthest(mine: np.ndarray, right: np.ndarray) -> float:
    """Return the largest difference of two arrays; NaN are the same."""
    if mine.shape != right.shape:
        return float("inf")
    same = (mine == right) | (np.isnan(mine) & np.isnan(right))
    return float(np.where(same, 0, np.abs(mine.astype("float64") - right)).max(initial=0))


def _pairs(left: World, right: World) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    yield from zip(left.outputs, right.outputs)
    for (_, mine), (_, other) in zip(left.weights(), right.weights()):
        yield mine, other


def _largest(left: World, right: World) -> float:
    return max(furthest(*pair) for pair in _pairs(left, right))


def noise_of(program: Program, plain: Plain, folder: Path) -> float:
    """Return how much another order of sums changes the plain result."""
    return _largest(_again(program, folder, turned=True), plain)


def _again(program: Program, folder: Path, **options: Any) -> Plain:
    again = Plain(program.setting, folder, **options)
    for statement in program.statements:
        statement.plain(again)
    return again


def _near_world(left: World, right: World) -> bool:
    return all(near(*pair) for pair in _pairs(left, right))


def apart_in(ours: Ours) -> str:
    """Return which weight's replicas are not the same bits, and how far they are apart."""
    for net in [*ours.nets.values(), *ours.kept]:
        for param in net_params(net):
            if param._data is None or "running" in param.name:
                continue
            first, *others = [weight.asnumpy() for weight in param.list_data()]
            for other in others:
                if not np.array_equal(first, other, equal_nan=True):
                    return f"{param.name} by {furthest(first, other):.3g}"
    return ""


def shortened(program: Program) -> Tuple[Program, Outcome]:
    """Return a shorter program with the same kind of finding, and its outcome."""
    begun, outcome, again = time.process_time(), outcome_of(program), True
    kind = outcome.kind
    while again:
        again = False
        for candidate in _simpler(program):
            if time.process_time() - begun > _MOST_CPU_S:
                break
            try:
                found = outcome_of(candidate)
            except Exception:
                continue  # the remaining program is invalid
            if found.kind == kind:
                program, outcome, again = candidate, found, True
                break
    return program, outcome


def _simpler(program: Program) -> Iterator[Program]:
    for statements in _fewer(program.statements):
        yield Program(program.setting, statements)
    setting = program.setting
    simple: Dict[str, Any] = {
        "hybridize": None,
        "schedule": "",
        "trainer": {},
        "arrays": "nd",
        "dtype": "float32",
        "passed_as": "block",
    }
    for name, value in simple.items():
        if getattr(setting, name) != value:
            yield Program(replace(setting, **{name: value}), program.statements)
    if setting.model not in ("mlp", "gan", "heads", "halves"):
        yield Program(replace(setting, model="mlp"), program.statements)
    if setting.optimizer != ("sgd", {"learning_rate": 0.1}):
        yield Program(replace(setting, optimizer=("sgd", {"learning_rate": 0.1})), program.statements)
    for num_devices in range(1, setting.num_devices):
        yield Program(replace(setting, num_devices=num_devices), program.statements)


def _fewer(statements: Tuple[Statement, ...]) -> Iterator[Tuple[Statement, ...]]:
    half = len(statements) // 2
    if half > 1:
        yield statements[half:]
        yield statements[:half]
    for i, statement in enumerate(statements):
        yield statements[:i] + statements[i + 1 :]
        if isinstance(statement, Group):
            for body in _fewer(statement.body):
                yield (*statements[:i], replace(statement, body=body), *statements[i + 1 :])
        for name, value in (("shares", ()), ("back", "mgpu"), ("split", "split_batch"), ("form", "step"), ("micro_steps", 1)):
            if getattr(statement, name, value) != value:
                yield (*statements[:i], replace(statement, **{name: value}), *statements[i + 1 :])
