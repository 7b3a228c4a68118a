"""Tasks that take turns: their order, what each sees, and how all end when one fails."""

import sys
from contextvars import ContextVar

import mxnet as mx
import pytest
from gluon_mgpu.data_parallel.lockstep import defer, exchange, is_in_lockstep, run_in_lockstep
from gluon_mgpu.errors import MissingExtraError, StepError
from mxnet import autograd

from .conftest import assert_house_style

pytestmark = pytest.mark.mxnet1("synchronised BatchNorm")

PLACE, ELSEWHERE = object(), object()
variable = ContextVar("variable", default=0)


def test_alone_there_is_nobody_to_wait_for():
    assert not is_in_lockstep() and exchange(PLACE, 3).values == [3]
    assert run_in_lockstep([lambda: (is_in_lockstep(), exchange(PLACE, 4).values)]) == [(True, [4])] and run_in_lockstep([]) == []
    called = []
    defer(lambda: called.append(1))
    assert called == [1]


def test_what_a_task_sets_is_its_own():
    def task(i):
        assert autograd.is_recording() and mx.current_context() == mx.cpu(5) and variable.get() == 7
        variable.set(i)
        autograd.set_training(i == 1)
        with mx.cpu(i), autograd.pause(train_mode=bool(i)):
            exchange(PLACE, None)
            return variable.get(), mx.current_context(), autograd.is_recording(), autograd.is_training()

    variable.set(7)
    with autograd.record(), mx.cpu(5):
        found = run_in_lockstep([lambda i=i: task(i) for i in range(3)])
        assert autograd.is_recording() and autograd.is_training() and mx.current_context() == mx.cpu(5) and variable.get() == 7
    assert found == [(0, mx.cpu(0), False, False), (1, mx.cpu(1), False, True), (2, mx.cpu(2), False, True)]


@pytest.mark.parametrize(
    "waits_for, error", [(lambda: 1 / 0, ZeroDivisionError), (lambda: exchange(ELSEWHERE, 0), StepError), (int, StepError)]
)
def test_when_one_fails_all_are_ended(waits_for, error):
    ended, deferred = [], []

    def waits():
        defer(lambda: deferred.append(1))
        try:
            exchange(PLACE, 1)
        finally:
            ended.append(1)

    with pytest.raises(error) as raised:
        run_in_lockstep([waits, waits_for, waits])
    if error is StepError:
        assert_house_style(raised.value)
    assert ended == ([1, 1] if error is StepError else [1])  # the third had not begun where the second raised
    assert deferred == [] and not is_in_lockstep()
    assert run_in_lockstep([lambda: exchange(PLACE, 1).values] * 2) == [[1, 1]] * 2


def test_without_greenlet_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(MissingExtraError, match="sync") as raised:
        run_in_lockstep([int])
    assert_house_style(raised.value)
