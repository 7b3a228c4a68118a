"""mxnet_internals/engine.py: what the engine has written, and functions in its queue."""

import threading

import mxnet as mx
import pytest
from gluon_mgpu.mxnet_internals import engine
from gluon_mgpu.mxnet_internals.engine import is_ready
from gluon_mgpu.runtime.openmp_threads import runs_serially

may_end = threading.Event()
events = []


@pytest.fixture(autouse=True)
def new_events():
    may_end.clear()
    events.clear()


class Waiter(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        may_end.wait(240)
        events.append("write")
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("readiness_waiter")
class WaiterProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Waiter()


def test_an_array_is_ready_when_it_has_been_written():
    if runs_serially():
        pytest.skip("the serial engine has no queue")
    x = mx.nd.ones((2,))
    x.wait_to_read()
    y = mx.nd.Custom(x, op_type="readiness_waiter")
    z = y + 1
    assert (is_ready(x), is_ready(y), is_ready(z), events) == (True, False, False, [])
    may_end.set()
    mx.nd.waitall()
    assert (is_ready(y), is_ready(z), events) == (True, True, ["write"])
    assert not engine._functions


def test_an_order_on_a_cpu_waits_for_no_other_worker():
    if runs_serially():
        pytest.skip("the serial engine has no queue")
    x, y = mx.nd.ones((2,)), mx.nd.ones((2,))
    mx.nd.waitall()
    for _ in range(8):  # more than MXNet has
        device = engine.EngineContext(engine.CPU, 0)
        engine.push(lambda: may_end.wait(240), device=device, where=engine.ON_PRIORITY_WORKER)
    engine.queue_in_order(mx.cpu(1), [x], [y])
    was_ready = is_ready(y)
    may_end.set()
    mx.nd.waitall()
    assert was_ready


@pytest.mark.parametrize("where", [engine.ON_WORKER, engine.ON_PRIORITY_WORKER, engine.AT_ONCE])
def test_a_pushed_function_runs_once_and_after_pending_writes(where):
    if runs_serially():
        may_end.set()
    y = mx.nd.Custom(mx.nd.ones((2,)), op_type="readiness_waiter")
    device = engine.EngineContext(engine.CPU, 0)
    engine.push(lambda: events.append("call"), device=device, reads=[y], where=where)
    assert runs_serially() or events == []
    may_end.set()
    mx.nd.waitall()
    assert events == ["write", "call"] and not engine._functions
