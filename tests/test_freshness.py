"""A sum over devices takes the gradients of one backward pass, as Gluon on one device uses those of the last."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import StaleGradientError, TrainerError
from gluon_mgpu.runtime import gradient_flags
from gluon_mgpu.trainer.freshness import history
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import assert_house_style, largest_difference, weights_of

CPU = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
ADAM = ("adam", {"learning_rate": 0.01})
MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01})


@pytest.fixture
def several():
    return CPU


@pytest.fixture(params=[1, 3])
def devices(request):
    """1 and 3 CPU contexts."""
    return [mx.cpu(i) for i in range(request.param)]


def dense(ctx, seed=0, units=1, in_units=3):
    net = nn.Dense(units, in_units=in_units)
    mx.random.seed(seed)
    net.initialize(mx.init.Normal(0.5), ctx=ctx)
    return net


def data(seed, size, width=3):
    return np.random.RandomState(seed).uniform(-1, 1, (size, width)).astype("float32")


def losses_of(forward, X, devices):
    """One loss per shard."""
    Xs, _ = mgpu.split_batch(X, X, devices)
    with autograd.record():
        return [(forward(x) ** 2).sum() for x in Xs]


def through(*parts):
    def forward(x):
        for part in parts:
            x = part(x)
        return x

    return forward


def one_by_one(losses):
    for loss in losses:
        loss.backward()


def in_halves(losses):
    for half in (losses[: len(losses) // 2], losses[len(losses) // 2 :]):
        if half:
            autograd.backward(half)


FORMS = {"mgpu.backward": mgpu.backward, "autograd.backward": autograd.backward, "one by one": one_by_one, "halves": in_halves}
form = pytest.mark.parametrize("backward", FORMS.values(), ids=FORMS)


def on_one_device(passes, optimizer=MOMENTUM, make=dense):
    """Weights of a plain Gluon loop: each item is (examples, whether a step follows)."""
    net = make(CPU[:1])
    trainer = gluon.Trainer(net.collect_params(), optimizer[0], dict(optimizer[1]))
    for X, has_step in passes:
        with autograd.record():
            loss = (net(mx.nd.array(X)) ** 2).sum()
        loss.backward()
        if has_step:
            trainer.step(len(X))
    return weights_of(net)


def assert_refused(call, told, error=TrainerError):
    with pytest.raises(error, match=told) as caught:
        call()
    assert_house_style(caught.value)


# Other losses, and batches without a step


@form
def test_a_generators_pass_does_not_count_for_the_discriminator(backward, several):
    """The generator's pass leaves gradients in the discriminator, on devices that the next batch may not reach."""
    found = []
    for devices in (CPU[:1], several):
        generator, discriminator = dense(devices, 1, units=3), dense(devices, 2)
        kind = gluon.Trainer if devices is not several else mgpu.Trainer
        trainers = [kind(net.collect_params(), *MOMENTUM) for net in (generator, discriminator)]
        go_back = autograd.backward if devices is not several else backward
        for step, size in enumerate((6, 1, 4, 1)):
            go_back(losses_of(through(generator, discriminator), data(step, 6), devices))
            trainers[0].step(6)
            go_back(losses_of(discriminator, data(10 + step, size), devices))
            trainers[1].step(size)
        found.append(weights_of(generator) + weights_of(discriminator))
    assert largest_difference(*found) <= 1e-6


def test_a_generators_pass_does_not_count_in_train_batch(several):
    passes = [(data(1, 6), False), (data(2, 1), True), (data(3, 6), False), (data(4, 2), True)]
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    other = mgpu.Trainer(dense(several), *MOMENTUM)
    for X, has_step in passes:
        if has_step:
            mgpu.train_batch(net, lambda out, y: (out**2).sum(axis=1), trainer, X, X)
        else:
            mgpu.backward(losses_of(through(net, lambda out: 2 * out), X, several))
            assert_refused(lambda: other.step(6), "no gradient", StaleGradientError)
    assert largest_difference(weights_of(net), on_one_device(passes)) <= 1e-6


@pytest.mark.parametrize("backward", [mgpu.backward, autograd.backward], ids=["mgpu.backward", "autograd.backward"])
def test_a_batch_that_is_left_out_does_not_count(backward, several):
    passes = [(data(1, 6), True), (data(2, 6), False), (data(3, 1), True), (data(4, 1), False), (data(5, 6), True)]
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    for X, has_step in passes:
        backward(losses_of(net, X, several))
        if has_step:
            trainer.step(len(X))
    assert largest_difference(weights_of(net), on_one_device(passes)) <= 1e-6


def test_a_batch_left_out_of_a_loop_over_losses_has_to_be_discarded(several):
    """Whether the last loss of the one batch belongs to the first of the next is not to be known."""
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    before = weights_of(net)
    one_by_one(losses_of(net, data(1, 6), several))
    one_by_one(losses_of(net, data(2, 1), several))
    assert_refused(lambda: trainer.step(1), r"several backward passes.*mgpu\.backward.*discard\(\)")
    assert largest_difference(before, weights_of(net)) == 0.0
    trainer.discard()
    one_by_one(losses_of(net, data(2, 1), several))
    trainer.step(1)
    assert largest_difference(weights_of(net), on_one_device([(data(2, 1), True)])) <= 1e-6


class Chosen(gluon.Block):
    """A trunk, and two layers of which each device uses one."""

    def __init__(self):
        super().__init__()
        self.trunk, self.layers = nn.Dense(3, in_units=3), nn.Sequential()
        self.layers.add(nn.Dense(1, in_units=3), nn.Dense(1, in_units=3))

    def forward(self, x, which):
        return self.layers[which](self.trunk(x))


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_train_batch_leaves_layers_alone_that_only_an_earlier_pass_reached(devices, micro_steps):
    """A pass that no step has used leaves fresh gradients in a layer that the batch of `train_batch` does not reach."""

    def layers(ctx):
        net = nn.Sequential()
        net.add(dense(ctx, 1, units=3), dense(ctx, 2))
        return net

    def loss(output, y):
        return (output**2).sum(axis=1)

    X, net, alone = data(2, 6), layers(devices), layers(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM, find_unused_parameters=True)
    mgpu.backward(losses_of(net, data(1, 6), devices))
    mgpu.train_batch(net[0], loss, trainer, X, X, micro_steps=micro_steps)
    mgpu.train_batch(alone[0], loss, mgpu.Trainer(alone[0], *MOMENTUM), X, X, micro_steps=micro_steps)
    assert largest_difference(weights_of(net), weights_of(alone)) == 0.0


def test_layers_that_only_some_devices_use(several):
    """Full batches reach every device, but a layer on another one than the batch before, which was left out."""
    found = []
    for devices in (CPU[:1], several):
        net = Chosen()
        mx.random.seed(3)
        net.initialize(mx.init.Normal(0.5), ctx=devices)
        trainer = (gluon.Trainer if devices is not several else mgpu.Trainer)(net.collect_params(), *MOMENTUM)
        for step, has_step in enumerate((True, False, True, False, True)):
            Xs, _ = mgpu.split_batch(data(step, 6), np.zeros(6), several)
            with autograd.record():
                used = [(x.as_in_context(devices[i % len(devices)]), int((i + step) % 3 == 0)) for i, x in enumerate(Xs)]
                losses = [(net(x, which) ** 2).sum() for x, which in used]
            mgpu.backward(losses)
            if has_step:
                trainer.step(6)
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-6


def test_two_losses_may_leave_gradients_of_different_passes(several):
    """Of each parameter, the last pass that wrote it counts: the trunk has the second loss's, the first head its own."""
    found = []
    for devices in (CPU[:1], several):
        net = Chosen()
        mx.random.seed(3)
        net.initialize(mx.init.Normal(0.5), ctx=devices)
        trainer = (gluon.Trainer if devices is not several else mgpu.Trainer)(net.collect_params(), *MOMENTUM)
        for sizes in ((6, 6), (6, 1), (1, 6)):
            for which, size in enumerate(sizes):
                autograd.backward(losses_of(lambda x, net=net, which=which: net(x, which), data(size + which, size), devices))
            trainer.step(6)
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-6


def test_losses_of_two_networks_may_alternate_device_by_device(several):
    found = []
    for devices in (CPU[:1], several):
        nets = [dense(devices, seed) for seed in (1, 2)]
        trainers = [(gluon.Trainer if devices is not several else mgpu.Trainer)(net.collect_params(), *MOMENTUM) for net in nets]
        for step in range(3):
            losses = [losses_of(net, data(step, 6), devices) for net in nets]
            for pair in zip(*losses):
                one_by_one(pair)
            for trainer in trainers:
                trainer.step(6)
        found.append(weights_of(nets[0]) + weights_of(nets[1]))
    assert largest_difference(*found) <= 1e-6


def test_two_losses_of_one_network_device_by_device_are_refused(several):
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    losses = [losses_of(net, data(seed, 6), several) for seed in (1, 2)]
    for pair in zip(*losses):
        one_by_one(pair)
    assert_refused(lambda: trainer.step(6), "several backward passes")


def test_one_call_of_backward_per_device_is_refused(several):
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    for loss in losses_of(net, data(1, 6), several):
        mgpu.backward([loss])
    assert_refused(lambda: trainer.step(6), "several backward passes")


@form
def test_every_form_of_a_loop_is_right(backward, several):
    passes = [(data(size, size), True) for size in (6, 1, 4, 2, 7)]
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    for X, _ in passes:
        backward(losses_of(net, X, several))
        trainer.step(len(X))
    assert largest_difference(weights_of(net), on_one_device(passes)) <= 1e-6


def test_each_device_may_have_a_thread_of_its_own(several):
    """GluonNLP's and GluonCV's `Parallel`: a thread for each device records and goes backward, at the same time as the others."""
    passes = [(data(seed, size), True) for seed, size in enumerate([6, 1, 5, 2, 3] * 12)]
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)

    def go_back(x):
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()

    with ThreadPoolExecutor(len(several)) as threads:
        for X, _ in passes:
            Xs, _ = mgpu.split_batch(X, X, several)
            list(threads.map(go_back, Xs))
            trainer.step(len(X))
    assert largest_difference(weights_of(net), on_one_device(passes)) <= 1e-5


def test_threads_leave_later_calls_as_they_are(several):
    """`mgpu.backward` of several threads must not make each later call of the main thread a pass of its own."""
    net = dense(several)
    inside, go_on = threading.Event(), threading.Event()

    def hold():
        with history.single_call():
            inside.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    with history.single_call():
        go_on.set()
        thread.join()
    trainer = mgpu.Trainer(net, *MOMENTUM)
    one_by_one(losses_of(net, data(1, 6), several))
    trainer.step(6)
    assert largest_difference(weights_of(net), on_one_device([(data(1, 6), True)])) <= 1e-6


def test_gradients_that_are_returned_are_no_pass(several):
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    number = history.number
    x = mx.nd.array(data(1, 1))
    x.attach_grad()
    with autograd.record():
        y = net(x).sum()
    autograd.grad([y], [x])
    assert history.number == number
    assert_refused(lambda: trainer.step(1), "no gradient", StaleGradientError)


def test_flags_of_the_c_interface_are_the_same(several, monkeypatch):
    monkeypatch.setattr(gradient_flags, "why_not_memory", lambda: "This test asks for the C interface.")
    test_a_batch_that_is_left_out_does_not_count(mgpu.backward, several)


def test_flags_look_as_mxnet_has_set_them(several):
    """A Gluon trainer, or a script, may look at them: they are cleared only while a pass runs."""
    nets = [dense(several, seed) for seed in (1, 2)]
    trainers = [mgpu.Trainer(net, *MOMENTUM) for net in nets]
    for net in nets:
        mgpu.backward(losses_of(net, data(1, 6), several))
    assert all(net.weight.data(context)._fresh_grad for net in nets for context in several)
    trainers[0].step(6)
    assert [net.weight.data(several[0])._fresh_grad for net in nets] == [0, 1]


def test_gradients_older_than_a_pass_without_data_do_not_count(several):
    """A process of several that gets no part of a batch makes no pass: its gradients are of the batch before."""
    net = dense(several)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    mgpu.backward(losses_of(net, data(1, 6), several))
    trainer.step(6)
    mgpu.backward(losses_of(net, data(2, 6), several))
    history.note_empty()
    writers, names = trainer._replicas._fresh.writers, ["weight", "bias"]
    fresh = np.ones_like(writers.calls, dtype=bool)
    assert not writers.since_empty(fresh, names, may_be_of_others=False).any()
    assert_refused(lambda: writers.since_empty(fresh, names, may_be_of_others=True), "several backward passes")
    mgpu.backward(losses_of(net, data(3, 6), several))
    assert writers.since_empty(fresh, names, may_be_of_others=True).all()


# discard() and accumulate()


def test_discard_drops_what_no_step_has_used(devices):
    net = dense(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    mgpu.backward(losses_of(net, data(1, 6), devices))
    trainer.discard()
    assert_refused(lambda: trainer.step(6), "no gradient", StaleGradientError)
    mgpu.backward(losses_of(net, data(2, 1), devices))
    trainer.step(1)
    assert largest_difference(weights_of(net), on_one_device([(data(2, 1), True)])) <= 1e-6


def test_discard_drops_sums_that_were_not_applied(devices):
    net = dense(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    mgpu.backward(losses_of(net, data(1, 6), devices))
    trainer.allreduce_grads()
    trainer.discard()
    with trainer.accumulate():
        mgpu.backward(losses_of(net, data(2, 1), devices))
        trainer.step(1)
    trainer.flush()
    assert largest_difference(weights_of(net), on_one_device([(data(2, 1), True)])) <= 1e-6


@form
def test_a_group_counts_no_pass_from_before(backward, devices):
    """Also on one device. A pass counts that a step inside follows before another pass."""
    batches = [data(seed, 6) for seed in (1, 2, 3)]
    net = dense(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    backward(losses_of(net, batches[0], devices))
    with trainer.accumulate():
        for X in (batches[1][:1], batches[1][1:]):
            backward(losses_of(net, X, devices))
            trainer.step(len(X))
    trainer.flush()
    backward(losses_of(net, batches[2][:2], devices))
    with trainer.accumulate():
        trainer.step(2)
        backward(losses_of(net, batches[2][2:], devices))
        trainer.step(4)
    trainer.flush()
    assert largest_difference(weights_of(net), on_one_device([(X, True) for X in batches[1:]])) <= 1e-6


def test_a_pass_between_those_of_one_update_that_no_step_counts_is_refused(devices):
    net = dense(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    before = weights_of(net)
    with trainer.accumulate():
        mgpu.backward(losses_of(net, data(1, 6), devices))
        trainer.step(6)
    mgpu.backward(losses_of(net, data(2, 6), devices))  # another loss's
    mgpu.backward(losses_of(net, data(3, 6), devices))
    assert_refused(lambda: trainer.step(6), "no step has counted")
    assert largest_difference(before, weights_of(net)) == 0.0
    mgpu.backward(losses_of(net, data(3, 1), devices))
    trainer.step(1)
    assert largest_difference(weights_of(net), on_one_device([(data(3, 1), True)])) <= 1e-6


def test_graphs_recorded_before_a_group_do_not_replace_each_other(devices):
    net = dense(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    early = [losses_of(net, data(seed, 6), devices) for seed in (1, 2)]
    with trainer.accumulate():
        for losses in early:
            mgpu.backward(losses)
    assert_refused(lambda: trainer.step(12), "replaced gradients")


def test_another_trainers_step_inside_a_group_is_refused(devices):
    net = dense(devices)
    first, second = (mgpu.Trainer(net, *MOMENTUM) for _ in range(2))
    batches = [data(seed, 4) for seed in (1, 2)]
    with first.accumulate():
        for X in batches:
            mgpu.backward(losses_of(net, X, devices))
            assert_refused(lambda: second.step(4), r"another trainer accumulates.*flush\(\) or discard\(\)")
            first.step(4)
    assert_refused(second.allreduce_grads, "another trainer accumulates")
    first.flush()
    assert largest_difference(weights_of(net), on_one_device([(np.concatenate(batches), True)])) <= 1e-6


def test_an_empty_group_leaves_gradients_as_they_are(devices):
    net = dense(devices)
    first, second = (mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}) for _ in range(2))
    with first.accumulate():
        pass
    passes = [(data(seed, 4), True) for seed in (1, 2)]
    for X, _ in passes:
        mgpu.backward(losses_of(net, X, devices))
        second.step(4)
    assert largest_difference(weights_of(net), on_one_device(passes, ("sgd", {"learning_rate": 0.1}))) <= 1e-6


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "kept"])
def test_a_trainer_replaced_in_the_middle_of_a_group(is_gone, devices):
    """A notebook cell is run again: gradients of the new trainer do not add up from step to step."""
    net = dense(devices)
    passes = [(data(seed, 4), True) for seed in (1, 2, 3)]
    trainer = mgpu.Trainer(net, *MOMENTUM)
    with trainer.accumulate():
        mgpu.backward(losses_of(net, passes[0][0], devices))
        trainer.step(4)
    old = None if is_gone else trainer
    trainer = mgpu.Trainer(net, *MOMENTUM)
    gc.collect()
    for X, _ in passes:
        mgpu.backward(losses_of(net, X, devices))
        trainer.step(4)
    assert {param.grad_req for param in net.collect_params().values()} == {"write"}
    assert largest_difference(weights_of(net), on_one_device(passes)) <= 1e-6
    if old is not None:
        assert_refused(old.flush, "another trainer of these parameters was made")
        assert_refused(lambda: old.step(4), "another trainer of these parameters was made")
        old.discard()
        old.flush()


def test_a_trainer_that_is_gone_in_the_middle_of_a_group(devices):
    """The other trainer of these parameters is older: its pass was added to what the one that is gone has left."""
    net = dense(devices)
    staying = mgpu.Trainer(net, *MOMENTUM)
    going = mgpu.Trainer(net, *MOMENTUM)
    with going.accumulate():
        mgpu.backward(losses_of(net, data(1, 4), devices))
        going.step(4)
    for param in net.collect_params().values():
        param._trainer = staying
    del going
    gc.collect()
    mgpu.backward(losses_of(net, data(2, 4), devices))
    assert_refused(lambda: staying.step(4), "a trainer that no longer exists")
    passes = [(data(seed, 4), True) for seed in (2, 3)]
    for X, _ in passes:
        mgpu.backward(losses_of(net, X, devices))
        staying.step(4)
    assert largest_difference(weights_of(net), on_one_device(passes)) <= 1e-6


# Sparse gradients, and gradients that the user lets add up


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_a_sparse_gradient_of_an_idle_device_has_no_rows(optimizer, several):
    """Lazy optimizers move the rows that a gradient has: a gradient of zeros with all rows would move the whole table."""
    batches = [np.array(words, "float32") for words in ([1, 2, 3, 3], [4], [1], [5, 6])]
    found = []
    for devices in (CPU[:1], several):
        net = nn.Embedding(50, 4, sparse_grad=True)
        mx.random.seed(2)
        net.initialize(mx.init.Normal(0.5), ctx=devices)
        trainer = (gluon.Trainer if devices is not several else mgpu.Trainer)(net.collect_params(), *optimizer)
        untouched = net.weight.data(devices[0]).asnumpy()[7:]
        for X in batches:
            autograd.backward(losses_of(net, X, devices))
            trainer.step(len(X))
            for gradient in net.weight.list_grad():
                assert gradient.data.shape[0] == len(set(X))
        np.testing.assert_array_equal(net.weight.data(devices[0]).asnumpy()[7:], untouched)
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-6


def test_sparse_gradients_need_a_step_after_each_pass():
    net = nn.Embedding(50, 4, sparse_grad=True)
    net.initialize(ctx=CPU[:1])
    trainer = mgpu.Trainer(net, *MOMENTUM)
    with trainer.accumulate():
        for words in ([1.0, 2.0], [3.0]):
            mgpu.backward(losses_of(net, np.array(words), CPU[:1]))
    assert_refused(lambda: trainer.step(3), "replaced gradients")


@pytest.mark.pairwise
@pytest.mark.parametrize("way", ["step", "allreduce_grads"])
@pytest.mark.parametrize("zeroed", [False, True], ids=["running", "zeroed"])
def test_gradients_that_the_user_adds_up_from_step_to_step(zeroed, way, devices, arrays):
    """Gluon applies the running sum; each device keeps its own, also one without data."""
    found = []
    for ctx, kind in ((CPU[:1], gluon.Trainer), (devices, mgpu.Trainer)):
        net = dense(ctx)
        net.weight.grad_req = "add"
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.01})
        for step, size in enumerate((6, 1, 4, 2, 6)):
            autograd.backward(losses_of(net, data(step, size), ctx))
            if way == "step" or kind is gluon.Trainer:
                trainer.step(size)
            else:
                trainer.allreduce_grads()
                trainer.update(size)
            if zeroed and step % 2:
                for gradient in net.weight.list_grad():
                    gradient[:] = 0
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-6


def test_a_pass_of_another_network_leaves_a_sum_for_its_update(devices):
    """The running sums are put back before it, and the sum over devices after it."""
    net, other = dense(devices), dense(devices, 1)
    net.weight.grad_req = "add"
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    mgpu.backward(losses_of(net, data(1, 6), devices))
    trainer.allreduce_grads()
    mgpu.backward(losses_of(other, data(1, 6), devices))
    trainer.update(6)
    expected = on_one_device([(data(1, 6), True)], ("sgd", {"learning_rate": 0.1}))
    assert largest_difference(weights_of(net), expected) <= 1e-6


def test_running_sums_are_not_clipped(devices):
    net = dense(devices)
    net.collect_params().setattr("grad_req", "add")
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.0}, clip_value=1e-6)
    for _ in range(2):
        mgpu.backward(losses_of(net, data(1, 6), devices))
        sums = sum(gradient.asnumpy() for gradient in [one.as_in_context(CPU[0]) for one in net.weight.list_grad()])
        trainer.step(6)
    alone = dense(devices)
    mgpu.backward(losses_of(alone, data(1, 6), devices))
    expected = 2 * sum(one.as_in_context(CPU[0]) for one in alone.weight.list_grad())
    np.testing.assert_allclose(sums, expected.asnumpy(), rtol=1e-5)
