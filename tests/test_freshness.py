"""For each parameter, the gradients of the last pass count, as in Gluon on one device."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import ModesError, StaleGradientError, TrainerError
from gluon_mgpu.mxnet_internals.blocks import compiled_graph
from gluon_mgpu.mxnet_internals.c_calls import Flags
from gluon_mgpu.mxnet_internals.parameters import is_fresh
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import initialized, largest_difference, sequential, stack, weights_of
from .versions import begin_thread, nd, set_params
from .worlds import devices as devices

CPU = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
ADAM = ("adam", {"learning_rate": 0.01})
MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01})


def dense(ctx, seed=0, units=1, in_units=3):
    mx.random.seed(seed)
    return initialized(nn.Dense(units, in_units=in_units), ctx, mx.init.Normal(0.5))


def world():
    net = dense(CPU)
    return net, mgpu.Trainer(net, *MOMENTUM)


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


def plain(losses):
    autograd.backward(losses)


FORMS = {"trainer.backward": None, "autograd.backward": plain, "one by one": one_by_one, "halves": in_halves}
form = pytest.mark.parametrize("backward", FORMS.values(), ids=FORMS)


def on_one_device(passes, optimizer=MOMENTUM, make=dense):
    """Weights of a plain Gluon loop: each item is (examples, whether a step follows)."""
    net = make(CPU[:1])
    trainer = gluon.Trainer(net.collect_params(), optimizer[0], dict(optimizer[1]))
    for X, has_step in passes:
        with autograd.record():
            loss = (net(nd.array(X)) ** 2).sum()
        loss.backward()
        if has_step:
            trainer.step(len(X))
    return weights_of(net)


def assert_refused(call, told, error=TrainerError):
    with pytest.raises(error, match=told):
        call()


# Other losses, and batches without a step


@form
def test_a_generators_pass_does_not_count_for_the_discriminator(backward):
    """The generator's pass leaves gradients in the discriminator, on devices that the next batch may not reach."""
    found = []
    for ctx in (CPU[:1], CPU):
        generator, discriminator = dense(ctx, 1, units=3), dense(ctx, 2)
        kind = gluon.Trainer if ctx is not CPU else mgpu.Trainer
        trainers = [kind(net.collect_params(), *MOMENTUM) for net in (generator, discriminator)]
        for step, size in enumerate((6, 1, 4, 1)):
            go_back = [plain, plain] if ctx is not CPU else [backward or one.backward for one in trainers]
            go_back[0](losses_of(through(generator, discriminator), data(step, 6), ctx))
            trainers[0].step(6)
            go_back[1](losses_of(discriminator, data(10 + step, size), ctx))
            if ctx is CPU and backward and size < len(ctx):
                assert_refused(partial(trainers[1].step, size), r"3 devices for 1 examples.*trainer\.backward")
                trainers[1].discard()
                trainers[1].backward(losses_of(discriminator, data(10 + step, size), ctx))
            trainers[1].step(size)
        found.append(weights_of(generator) + weights_of(discriminator))
    assert largest_difference(*found) <= 1e-6


@pytest.mark.parametrize("form_of_loop", [name for name in FORMS if FORMS[name]])
def test_a_batch_left_out_of_a_loop_over_losses_has_to_be_discarded(form_of_loop):
    """A batch with fewer examples than devices comes next. More devices have gradients than it has examples."""
    net, trainer = world()
    before = weights_of(net)
    FORMS[form_of_loop](losses_of(net, data(1, 6), CPU))
    FORMS[form_of_loop](losses_of(net, data(2, 1), CPU))
    assert_refused(lambda: trainer.step(1), r"3 devices for 1 examples.*trainer\.backward.*discard\(\)")
    assert largest_difference(before, weights_of(net)) == 0.0
    trainer.discard()
    one_by_one(losses_of(net, data(2, 1), CPU))
    trainer.step(1)
    assert largest_difference(weights_of(net), on_one_device([(data(2, 1), True)])) <= 1e-6


class Chosen(gluon.Block):
    """A trunk, and two layers of which each device uses one."""

    def __init__(self, devices):
        super().__init__()
        self.trunk, self.layers = nn.Dense(3, in_units=3), nn.Sequential()
        self.layers.add(nn.Dense(1, in_units=3), nn.Dense(1, in_units=3))
        mx.random.seed(3)
        self.initialize(mx.init.Normal(0.5), ctx=devices)

    def forward(self, x, which):
        return self.layers[which](self.trunk(x))


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_train_batch_leaves_layers_alone_that_only_an_earlier_pass_reached(devices, micro_steps):
    """A pass that no step has used leaves fresh gradients in a layer that the batch of `train_batch` does not reach."""

    def layers(ctx):
        return stack(dense(ctx, 1, units=3), dense(ctx, 2), kind=nn.Sequential)

    def loss(output, y):
        return (output**2).sum(axis=1)

    X, net, alone = data(2, 6), layers(devices), layers(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM, find_unused_parameters=True)
    trainer.backward(losses_of(net, data(1, 6), devices))
    mgpu.train_batch(net[0], loss, trainer, X, X, micro_steps=micro_steps)
    mgpu.train_batch(alone[0], loss, mgpu.Trainer(alone[0], *MOMENTUM), X, X, micro_steps=micro_steps)
    assert largest_difference(weights_of(net), weights_of(alone)) == 0.0


def test_layers_that_only_some_devices_use():
    """Full batches reach every device, but a layer on another one than the batch before, which was left out."""
    found = []
    for ctx in (CPU[:1], CPU):
        net = Chosen(ctx)
        trainer = (gluon.Trainer if ctx is not CPU else mgpu.Trainer)(net.collect_params(), *MOMENTUM)
        for step, has_step in enumerate((True, False, True, False, True)):
            Xs, _ = mgpu.split_batch(data(step, 6), np.zeros(6), CPU)
            with autograd.record():
                used = [(x.as_in_context(ctx[i % len(ctx)]), int((i + step) % 3 == 0)) for i, x in enumerate(Xs)]
                losses = [(net(x, which) ** 2).sum() for x, which in used]
            trainer.backward(losses) if ctx is CPU else autograd.backward(losses)
            if has_step:
                trainer.step(6)
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-6


def test_two_losses_may_leave_gradients_of_different_passes():
    """Of each parameter, the last pass that wrote it counts: the trunk has the second loss's, the first head its own."""
    found = []
    for ctx in (CPU[:1], CPU):
        net = Chosen(ctx)
        trainer = (gluon.Trainer if ctx is not CPU else mgpu.Trainer)(net.collect_params(), *MOMENTUM)
        go_back = trainer.backward if ctx is CPU else autograd.backward
        for sizes in ((6, 6), (6, 1), (1, 6)):
            for which, size in enumerate(sizes):
                go_back(losses_of(lambda x, net=net, which=which: net(x, which), data(size + which, size), ctx))
            trainer.step(6)
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-6


def test_one_call_of_backward_per_device_is_refused():
    net, trainer = world()
    first, second, _ = losses_of(net, data(1, 6), CPU)
    trainer.backward([first])
    assert_refused(lambda: trainer.backward([second]), "passes over different devices")
    assert_refused(lambda: trainer.step(6), "no gradient", StaleGradientError)
    trainer.backward(losses_of(net, data(1, 6), CPU))
    trainer.step(6)
    assert largest_difference(weights_of(net), on_one_device([(data(1, 6), True)])) <= 1e-6


def test_running_sums_of_one_call_of_backward_per_device():
    net, trainer = world()
    set_params(net, "grad_req", "add")
    for loss in losses_of(net, data(1, 6), CPU):
        trainer.backward([loss])
    trainer.step(6)
    assert largest_difference(weights_of(net), on_one_device([(data(1, 6), True)])) <= 1e-6


@pytest.mark.mxnet1("graphs that threads share")
def test_graphs_are_there_for_threads_when_parameters_have_moved():
    """Threads that call a block at once would each trace it, and fail in its name scope."""
    net = sequential(nn.Dense(4), nn.Dense(2), ctx=CPU, hybridize={})
    trainer = mgpu.Trainer(net, *MOMENTUM)
    with autograd.record():
        losses = [net(nd.ones((2, 3), ctx=context)).sum() for context in CPU]
    former = compiled_graph(net)
    autograd.backward(losses)
    trainer.step(6)
    assert former is not compiled_graph(net) is not None
    with autograd.record():
        losses = [net(nd.ones((2, 3), ctx=context)).sum() for context in CPU]
    autograd.backward(losses)
    trainer.step(6)
    net.hybridize(False)
    assert mgpu.replica_difference(net) == 0.0


def test_each_device_may_have_a_thread_of_its_own():
    """GluonNLP's and GluonCV's `Parallel`: a thread for each device records and goes backward, at the same time as the others."""
    passes = [(data(seed, size), True) for seed, size in enumerate([6, 1, 5, 2, 3] * 12)]
    net, trainer = world()

    def go_back(x):
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()

    with ThreadPoolExecutor(len(CPU)) as threads:
        for X, _ in passes:
            Xs, _ = mgpu.split_batch(X, X, CPU)
            list(threads.map(go_back, Xs))
            trainer.step(len(X))
    assert largest_difference(weights_of(net), on_one_device(passes)) <= 1e-5


def test_a_plain_pass_after_one_of_the_trainer_is_refused():
    """Of a generator, through the discriminator: it has overwritten the gradients."""
    nets = dense(CPU, 1, units=3), dense(CPU, 2)
    trainers = [mgpu.Trainer(net, *MOMENTUM) for net in nets]
    trainers[1].backward(losses_of(nets[1], data(1, 6), CPU))
    trainers[0].backward(losses_of(through(*nets), data(2, 6), CPU))
    assert_refused(lambda: trainers[1].step(6), "a step uses the gradients of one pass", ModesError)
    trainers[1].discard()
    trainers[0].step(6)


def test_two_threads_train_two_networks():
    """Each pass cleared the flags of the other network's gradients."""
    passes = [(data(seed, size), True) for seed, size in enumerate([6, 1, 5, 2, 3] * 6)]
    worlds = [world() for _ in range(2)]

    def train(net, trainer, by_hand):
        begin_thread()
        for X, _ in passes:
            if by_hand:
                trainer.backward(losses_of(net, X, CPU))
                trainer.step(len(X))
            else:
                mgpu.train_batch(net, lambda output, _: (output**2).sum(axis=1), trainer, X, X)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, *zip(*worlds), (True, False)))
    for net, _ in worlds:
        assert largest_difference(weights_of(net), on_one_device(passes)) <= 1e-5


def test_gradients_that_are_returned_are_no_pass():
    net, trainer = world()
    x = nd.array(data(1, 1))
    x.attach_grad()
    with autograd.record():
        y = net(x).sum()
    autograd.grad([y], [x])
    assert_refused(lambda: trainer.step(1), "no gradient", StaleGradientError)


def test_batches_that_are_split_ahead():
    """The last batch, which does not reach all devices, is split while those before it are trained on."""
    net, trainer = world()
    batches = [data(seed, size) for seed, size in ((1, 6), (2, 6), (3, 1))]
    for Xs, _ in mgpu.prefetch([(X, X) for X in batches], CPU):
        with autograd.record():
            losses = [(net(x) ** 2).sum() for x in Xs]
        one_by_one(losses)
        trainer.step(sum(len(x) for x in Xs))
    assert largest_difference(weights_of(net), on_one_device([(X, True) for X in batches])) <= 1e-6


def test_flags_look_as_mxnet_has_set_them():
    """A Gluon trainer, or a script, may look at them: only a pass or a step of their own trainer clears them."""
    nets = [dense(CPU, seed) for seed in (1, 2)]
    trainers = [mgpu.Trainer(net, *MOMENTUM) for net in nets]
    for net in nets:
        autograd.backward(losses_of(net, data(1, 6), CPU))
    assert all(is_fresh(net.weight.data(context)) for net in nets for context in CPU)
    trainers[0].step(6)
    assert [is_fresh(net.weight.data(CPU[0])) for net in nets] == [0, 1]


# discard() and accumulate()


def test_a_generator_and_its_discriminator_accumulate(devices):
    """Each leaves the other's gradients of its own passes out of its sum."""
    found = []
    for micro_steps in (1, 2):
        generator, discriminator = dense(devices, 1, units=3), dense(devices, 2)
        trainers = [mgpu.Trainer(net, *MOMENTUM) for net in (generator, discriminator)]
        for turn in range(2):
            whole = data(turn, 6), data(10 + turn, 6)
            with trainers[0].accumulate(), trainers[1].accumulate():
                for noise, real in zip(*(np.split(one, micro_steps) for one in whole)):
                    trainers[0].backward(losses_of(through(generator, discriminator), noise, devices))
                    trainers[0].step(len(noise))
                    trainers[1].backward(losses_of(discriminator, real, devices))
                    trainers[1].step(len(real))
            for trainer in trainers:
                trainer.flush()
        found.append(weights_of(generator) + weights_of(discriminator))
    assert largest_difference(*found) <= 1e-6


def test_another_trainers_step_inside_a_group(devices):
    """It uses the gradients, whose flags are then cleared: they are not there for the sum."""
    net = dense(devices)
    first, second = (mgpu.Trainer(net, *MOMENTUM) for _ in range(2))
    with first.accumulate():
        autograd.backward(losses_of(net, data(1, 4), devices))
        second.step(4)
        assert_refused(lambda: first.step(4), "no gradient", StaleGradientError)
    assert largest_difference(weights_of(net), on_one_device([(data(1, 4), True)])) <= 1e-6


# Sparse gradients, and gradients that the user lets add up


@pytest.mark.mxnet1("sparse arrays")
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_a_sparse_gradient_of_an_idle_device_has_no_rows(optimizer):
    """Lazy optimizers move the rows that a gradient has: a gradient of zeros with all rows would move the whole table."""
    batches = [np.array(words, "float32") for words in ([1, 2, 3, 3], [4], [1], [5, 6])]
    found = []
    for ctx in (CPU[:1], CPU):
        mx.random.seed(2)
        net = initialized(nn.Embedding(50, 4, sparse_grad=True), ctx, mx.init.Normal(0.5))
        trainer = (gluon.Trainer if ctx is not CPU else mgpu.Trainer)(net.collect_params(), *optimizer)
        untouched = net.weight.data(ctx[0]).asnumpy()[7:]
        for X in batches:
            autograd.backward(losses_of(net, X, ctx))
            trainer.step(len(X))
            for gradient in net.weight.list_grad():
                assert gradient.data.shape[0] == len(set(X))
        np.testing.assert_array_equal(net.weight.data(ctx[0]).asnumpy()[7:], untouched)
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-6


def test_a_pass_of_another_network_leaves_a_sum_for_its_update(devices):
    """It does not write the gradients that were summed. A pass of the same network would add to the sum over the devices."""
    net, other = dense(devices), dense(devices, 1)
    net.weight.grad_req = "add"
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    trainer.backward(losses_of(net, data(1, 6), devices))
    trainer.allreduce_grads()
    autograd.backward(losses_of(other, data(1, 6), devices))
    trainer.update(6)
    expected = on_one_device([(data(1, 6), True)], ("sgd", {"learning_rate": 0.1}))
    assert largest_difference(weights_of(net), expected) <= 1e-6
    trainer.backward(losses_of(net, data(1, 6), devices))
    trainer.allreduce_grads()
    trainer.backward(losses_of(net, data(1, 6), devices))
    assert_refused(trainer.allreduce_grads, r"Call update\(\) after it, or discard\(\)")


@pytest.mark.mxnet1("Pipeline")
def test_a_trainer_without_trained_parameters_does_not_disturb_a_split():
    """Its table of gradients is empty; every later split that left a device idle raised a TypeError."""
    net = initialized(nn.Dense(2, in_units=3), CPU)
    set_params(net, "grad_req", "null")
    trainer = mgpu.Trainer(net, "sgd")
    for _ in range(2):
        Xs, _ = mgpu.split_batch(np.ones((1, 3), "float32"), np.zeros(1), CPU)
    assert len(Xs) == 1 and trainer.learning_rate == 0.01


def test_a_batch_that_fails_hides_no_pass_that_follows(devices):
    """Gradients of a pass by hand after its error are used once."""
    net = dense(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    with pytest.raises(mgpu.errors.StepError):
        mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, data(0, 6, width=5), data(0, 6, width=1))
    autograd.backward(losses_of(net, data(0, 6), devices))
    trainer.step(6)
    with pytest.raises(StaleGradientError):
        trainer.step(6)


@pytest.mark.mxnet1("compiled passes")
def test_a_compiled_pass_of_another_network_does_not_count_on_a_device_without_data():
    net, head = dense(CPU), dense(CPU, in_units=1)
    both = stack(net, head)
    trainers = [mgpu.Trainer(part, "sgd", {"learning_rate": 0.1}) for part in (net, head)]
    mgpu.compile_step(both, gluon.loss.L2Loss(), trainers[0])(data(0, 4), data(1, 4, width=1))
    autograd.backward(losses_of(head, data(0, 1, width=1), CPU))
    assert_refused(partial(trainers[1].step, 1), "3 devices for 1 examples")


@pytest.mark.mxnet1("compiled passes")
def test_a_compiled_step_uses_the_gradients_of_shared_parameters():
    net = dense(CPU)
    trainers = [mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}) for _ in range(2)]
    mgpu.compile_step(net, gluon.loss.L2Loss(), trainers[0])(data(0, 4), data(1, 4, width=1))
    for trainer in trainers:
        assert_refused(partial(trainer.step, 4), "no gradient", StaleGradientError)


@pytest.mark.mxnet1("compiled passes")
def test_compiled_steps_read_no_flags_and_refuse_those_they_find_later(monkeypatch):
    net, L2 = dense(CPU), gluon.loss.L2Loss()
    trainer = mgpu.Trainer(net, *MOMENTUM)
    step = mgpu.compile_step(net, L2, trainer)
    by_hand = partial(losses_of, net, data(0, 6), CPU)
    autograd.backward(by_hand())
    step(data(0, 6), data(1, 6, width=1))
    with monkeypatch.context() as patched:
        for name in ("read", "put", "clear"):
            patched.delattr(Flags, name)
        step(data(0, 6), data(1, 6, width=1))
    assert_refused(partial(trainer.step, 6), "no gradient", StaleGradientError)
    autograd.backward(by_hand())
    assert_refused(partial(trainer.step, 6), "compile_step", ModesError)
    trainer.backward(by_hand())
    trainer.step(6)
    mgpu.fit(net, L2, trainer, [(data(0, 6), data(1, 6, width=1))], epochs=2, callbacks=[], compiled="on")
    autograd.backward(by_hand())
    trainer.step(6)


@pytest.mark.mxnet1("compiled passes")
@pytest.mark.parametrize("change", ["an unrelated trainer", "frozen"])
def test_flags_older_than_compiled_steps_stay_unknown(change):
    net, batch = nn.HybridSequential(), (data(0, 6), data(1, 6, width=1))
    net.add(dense(CPU, units=3), dense(CPU))
    trainer, other = mgpu.Trainer(net, *MOMENTUM), dense(CPU)
    step = mgpu.compile_step(net, gluon.loss.L2Loss(), trainer)
    for _ in range(2):
        step(*batch)
        autograd.backward(losses_of(net, data(0, 6), CPU))
    mgpu.compile_step(other, gluon.loss.L2Loss(), mgpu.Trainer(other, *MOMENTUM))(*batch)
    step(*batch)
    if change == "frozen":
        set_params(net[0], "grad_req", "null")
    mgpu.Trainer(dense(CPU), *MOMENTUM)
    assert_refused(partial(trainer.step, 6, ignore_stale_grad=True), "compile_step", ModesError)


@pytest.mark.mxnet1("compiled passes")
def test_compiled_micro_steps_do_not_mind_a_look_at_gradients():
    net, batch = dense(CPU), (data(0, 6), data(1, 6, width=1))
    trainer = mgpu.Trainer(net, *MOMENTUM)
    for _ in range(3):
        mgpu.compile_step(net, gluon.loss.L2Loss(), trainer, micro_steps=2)(*batch)
        autograd.backward(losses_of(net, data(0, 6), CPU))
    assert trainer.optimizer.num_update == 3


@pytest.mark.parametrize(
    "parts", ["micro_steps", "virtual_shards", pytest.param("micro_batches", marks=pytest.mark.mxnet1("Pipeline"))]
)
def test_parts_of_a_batch_leave_another_trainer_only_the_last_ones_gradients(parts):
    is_pipeline = parts == "micro_batches"
    blocks = [dense(CPU[:1] if is_pipeline else CPU, 1, units=3), dense(CPU[:1] if is_pipeline else CPU, 2)]
    net = stack(*blocks, kind=nn.Sequential)
    net = mgpu.Pipeline(blocks, CPU[:2], micro_batches=2) if is_pipeline else net
    first = mgpu.Trainer(blocks[0], *MOMENTUM, virtual_shards=6 if parts == "virtual_shards" else None)
    second = mgpu.Trainer(blocks[1], *MOMENTUM)
    batch, loss = (data(2, 6), data(3, 6, width=1)), gluon.loss.L2Loss()
    mgpu.train_batch(net, loss, first, *batch, micro_steps=2 if parts == "micro_steps" else 1)
    assert_refused(partial(second.step, 6), "no gradient", StaleGradientError)
    if not is_pipeline:  # another pass replaces them
        autograd.backward(losses_of(net, batch[0], CPU))
        second.step(6)


def test_a_gradient_is_used_once_by_trainers_that_share_it():
    net = dense(CPU)
    first = mgpu.Trainer(net, *MOMENTUM)
    autograd.backward(losses_of(net, data(1, 6), CPU))
    mgpu.Trainer(net, *MOMENTUM).step(6)
    assert_refused(partial(first.step, 6), "no gradient", StaleGradientError)


def test_running_sums_are_dropped_before_they_have_a_place():
    net = dense(CPU, in_units=0)
    set_params(net, "grad_req", "add")
    trainer = mgpu.Trainer(net, *MOMENTUM)
    trainer.backward(losses_of(net, data(1, 6), CPU))
    trainer.discard()
    assert all((gradient.asnumpy() == 0).all() for param in trainer.params for gradient in param.list_grad())


def test_a_batch_does_not_mind_the_passes_that_it_drops():
    net = dense(CPU[:2])
    trainer = mgpu.Trainer(net, *MOMENTUM)
    trainer.backward(losses_of(net, data(0, 1), CPU[:2]))
    split_f = partial(mgpu.split_batch, weights=[0, 1])  # on the other device
    mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, data(1, 1), data(2, 1, width=1), split_f=split_f)
    assert trainer.optimizer.num_update == 1


def trunk_and_head():
    """A network in two parts, and a trainer of each."""
    net = sequential(nn.Dense(3, in_units=2), nn.Dense(1, in_units=3), ctx=CPU[:2])
    return net, *(mgpu.Trainer(part, "sgd", {"learning_rate": 0.01}) for part in net)


@pytest.mark.mxnet1("compiled passes")
def test_compiled_steps_leave_gradients_for_the_trainer_of_other_layers():
    X, y = data(1, 4, 2), np.zeros((4, 1), "float32")
    found, loss = [], gluon.loss.L2Loss()
    for compiled in (True, False):
        mx.random.seed(0)
        net, trunk, head = trunk_and_head()
        step = mgpu.compile_step(net, loss, head) if compiled else partial(mgpu.train_batch, net, loss, head)
        for _ in range(3):
            step(X, y)
            trunk.step(4)
        found.append(weights_of(net))
    assert largest_difference(*found) < 1e-6


def test_frozen_parameters_have_no_parts():
    """Their trainer's step raised an IndexError."""
    net, trunk, head = trunk_and_head()
    X, y = data(1, 4, 2), np.zeros((4, 1), "float32")
    mgpu.train_batch(net, gluon.loss.L2Loss(), trunk, X, y, micro_steps=2)
    set_params(net[1], "grad_req", "null")
    mgpu.backward(losses_of(net, X, CPU[:2]), [trunk, head])
    trunk.step(4)
    head.step(4, ignore_stale_grad=True)


@pytest.mark.parametrize("is_part", [False, True])
def test_one_pass_does_not_serve_two_trainers_of_one_parameter(is_part):
    """The first trainer found no gradient, or trained without those that they share."""
    net, _, head = trunk_and_head()
    trainers = [mgpu.Trainer(net, *MOMENTUM, find_unused_parameters=True), head]
    losses = losses_of(net, data(1, 4, 2), CPU[:2])
    trainers = trainers if is_part else [trainers[0], trainers[0]]
    assert_refused(partial(mgpu.backward, losses, trainers), "two trainers of", TrainerError)


@pytest.mark.parametrize("options", [{"micro_steps": 2}, {"virtual_shards": 2}], ids=str)
def test_parts_of_a_batch_write_over_a_pass_of_another_trainer(options):
    """Its step used them, without an error."""
    net, _, head = trunk_and_head()
    trunk = mgpu.Trainer(net[0], *MOMENTUM, virtual_shards=options.get("virtual_shards"))
    head.backward(losses_of(net[1], data(1, 4), CPU[:2]))
    batch = data(2, 4, 2), data(3, 4, 1)
    mgpu.train_batch(net, gluon.loss.L2Loss(), trunk, *batch, micro_steps=options.get("micro_steps", 1))
    assert_refused(partial(head.step, 4), "no gradient", StaleGradientError)
    head.backward(losses_of(net[1], data(1, 4), CPU[:2]))
    head.allreduce_grads()
    mgpu.train_batch(net, gluon.loss.L2Loss(), trunk, *batch, micro_steps=options.get("micro_steps", 1))
    assert_refused(partial(head.update, 4), "not summed")
    head.backward(losses_of(net[1], data(1, 4), CPU[:2]))
    head.step(4)


@pytest.mark.mxnet1("compiled passes")
def test_compiled_virtual_shards_drop_earlier_passes():
    """They were refused as a second pass before the step."""
    found = []
    for has_earlier in (True, False):
        net = dense(CPU[:2])
        net.hybridize()
        trainer = mgpu.Trainer(net, *MOMENTUM, virtual_shards=2)
        if has_earlier:
            autograd.backward(losses_of(net, data(1, 4), CPU[:2]))
        mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, data(2, 4), data(3, 4, 1), compiled="on")
        found.append(weights_of(net))
    assert largest_difference(*found) == 0


@pytest.mark.mxnet1("compiled passes")
@pytest.mark.parametrize("form_of_pass", ["trainer.backward", "autograd.backward"])
def test_a_compiled_batch_that_fails_leaves_no_earlier_pass(form_of_pass):
    """A step used its gradients in the place of those of the pass before."""
    net = dense(CPU[:2])
    net.hybridize()
    trainer, loss = mgpu.Trainer(net, *MOMENTUM), gluon.loss.L2Loss()
    losses = losses_of(net, data(1, 4), CPU[:2])
    (FORMS[form_of_pass] or trainer.backward)(losses)

    class Mean(gluon.loss.Loss):
        def hybrid_forward(self, F, output, label):
            return loss(output, label).mean()

    step = mgpu.compile_step(net, Mean(None, 0), trainer)
    assert_refused(partial(step, data(2, 4), data(3, 4, 1)), "one number for each example", TrainerError)
    assert_refused(partial(trainer.step, 4), "no gradient", StaleGradientError)
