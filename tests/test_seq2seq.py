import functools

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.models.seq2seq.attention import Attention
from gluon_mgpu.models.seq2seq.loss import SequenceLoss
from gluon_mgpu.models.seq2seq.network import Seq2Seq
from gluon_mgpu.models.seq2seq.recurrence import Recurrence
from mxnet import autograd, gluon

from .conftest import assert_house_style, largest_difference, weights_of
from .test_no_sync import waits  # noqa: F401

SOURCE_VOCAB, TARGET_VOCAB = 9, 11
MODELS = {
    "gru dot": {},
    "lstm additive": {"cell": "lstm", "attention": "additive", "num_layers": 2},
    "gru additive fed": {"attention": "additive", "input_feeding": True},
    "lstm dot fed tied": {"cell": "lstm", "input_feeding": True, "tied": True, "num_layers": 2},
}


def small_model(ctx, hybridize=False, **options):
    mx.random.seed(0)
    net = Seq2Seq(SOURCE_VOCAB, TARGET_VOCAB, embed_size=6, hidden_size=6, **options)
    net.initialize(mx.init.Uniform(0.5), ctx=ctx)
    if hybridize:
        net.hybridize()
    return net


def pairs(num, layout="NTC", seed=0):
    """A batch as the data side makes it: lengths of all kinds, padding of 0, host arrays."""
    rng = np.random.RandomState(seed)
    source_lengths, target_lengths = rng.randint(1, 6, num), rng.randint(1, 7, num)
    source = rng.randint(1, SOURCE_VOCAB, (num, 5)) * (np.arange(5) < source_lengths[:, None])
    output = rng.randint(1, TARGET_VOCAB, (num, 6)) * (np.arange(6) < target_lengths[:, None])
    given = np.concatenate([np.ones((num, 1), int), output[:, :-1]], axis=1)
    arrays = [array.astype("int32") if layout == "NTC" else array.T.astype("int32") for array in (source, given, output)]
    return (arrays[0], source_lengths.astype("int32"), arrays[1]), (arrays[2], target_lengths.astype("int32"))


def on_device(batch, arrays):
    return tuple(on_device(one, arrays) if isinstance(one, tuple) else arrays.array(one, dtype="int32") for one in batch)


def passed_back(net, loss, batch, arrays):
    """The losses and gradients of a batch on one device, as NumPy arrays."""
    X, y = on_device(batch, arrays)
    with autograd.record():
        losses = loss(net(X), y)
    losses.backward()
    return losses.asnumpy(), [param.grad().asnumpy() for param in net.collect_params().values()]


# ---- layers


@pytest.mark.parametrize("recurrence", ["fused", "steps"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_recurrence_is_gluon_s_cell(cell, recurrence):
    """Gluon's cell, unrolled, has the same parameters and gives the same."""
    theirs = (gluon.rnn.GRUCell if cell == "gru" else gluon.rnn.LSTMCell)(4, input_size=3, prefix="theirs_")
    ours = Recurrence(cell, 4, 3, recurrence)
    for block in (theirs, ours):
        block.initialize(mx.init.Uniform(0.5))
    for name in ("i2h_weight", "h2h_weight", "i2h_bias", "h2h_bias"):
        values = mx.nd.random.uniform(-0.5, 0.5, getattr(ours, name).shape)
        getattr(ours, name).set_data(values)
        getattr(theirs, name).set_data(values)
    inputs = mx.nd.random.normal(shape=(5, 2, 3))
    states = [mx.nd.random.normal(shape=(2, 4)) for _ in range(ours.num_states)]
    expected, expected_states = theirs.unroll(5, inputs, states, layout="TNC", merge_outputs=True)
    outputs, *after = ours(inputs, *states)
    assert largest_difference([outputs.asnumpy()], [expected.asnumpy()]) < 1e-6
    assert largest_difference([one.asnumpy() for one in after], [one.asnumpy() for one in expected_states]) < 1e-6


def test_auto_goes_by_steps_where_many_cpu_contexts_work_at_once(monkeypatch):
    for num_contexts, num_cores, fused in ((1, 8, True), (2, 8, True), (3, 2, True), (3, 8, False), (8, 3, False)):
        monkeypatch.setattr("gluon_mgpu.models.seq2seq.recurrence.num_cores", lambda num=num_cores: num)
        layer = Recurrence("gru", 2, 2)
        layer.initialize(ctx=[mx.cpu(i) for i in range(num_contexts)])
        assert layer.is_fused(mx.cpu(0)) == fused
        assert layer.is_fused(mx.gpu(0))


@pytest.mark.parametrize("kind", ["dot", "additive"])
def test_attention_is_what_the_papers_write(kind):
    rng = np.random.RandomState(0)
    queries, keys, values = rng.randn(2, 3, 4), rng.randn(2, 5, 4), rng.randn(2, 5, 6)
    lengths = [5, 2]
    layer = Attention(kind, 4, 6)
    layer.initialize(mx.init.Uniform(1))
    got = layer(*(mx.nd.array(array) for array in (queries, keys, values)), mx.nd.array(lengths, dtype="int32"))
    join = layer.join.weight.data().asnumpy()
    vectors, weights = np.zeros((2, 3, 4)), np.zeros((2, 5, 3))
    for n, length in enumerate(lengths):
        for t, query in enumerate(queries[n]):
            if kind == "dot":
                scores = [query @ key for key in keys[n, :length]]
            else:
                matrix, v = layer.query.weight.data().asnumpy(), layer.score.weight.data().asnumpy()[0]
                scores = [v @ np.tanh(matrix @ query + key) for key in keys[n, :length]]
            weights[n, :length, t] = np.exp(scores) / np.exp(scores).sum()
            found = weights[n, :, t] @ values[n]
            vectors[n, t] = np.tanh(join @ np.concatenate([found, query]))
    assert largest_difference([array.asnumpy() for array in got], [vectors, weights]) < 1e-6
    assert (got[1].asnumpy()[1, 2:] == 0).all()


# ---- the network


@pytest.mark.pairwise
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_padding_changes_nothing(arrays, options, hybridize):
    """Each sentence alone, without padding, gives the scores that it has in the batch."""
    net = small_model(mx.cpu(), hybridize, **options)
    (source, lengths, target), (_, target_lengths) = pairs(6)
    together = net(on_device((source, lengths, target), arrays))
    assert isinstance(together, mx.np.ndarray) == (arrays is mx.np)
    for i, (s, t) in enumerate(zip(lengths, target_lengths)):
        alone = net(on_device((source[i : i + 1, :s], lengths[i : i + 1], target[i : i + 1, :t]), arrays))
        np.testing.assert_allclose(alone.asnumpy()[0], together.asnumpy()[i, :t], atol=2e-6)


def test_the_encoder_reads_backwards_from_the_last_true_token():
    """The last word changes what the first position knows; padding does not. Without reversal inside the length it would."""
    net = small_model(mx.cpu())

    def first_value(source, length):
        tokens = mx.nd.array([source], dtype="int32")
        return net.encode(tokens, mx.nd.array([length], dtype="int32"))[1][1].asnumpy()[0, 0]

    assert np.abs(first_value([1, 2, 3, 0], 3) - first_value([1, 2, 4, 0], 3)).max() > 1e-3
    np.testing.assert_allclose(first_value([1, 2, 3, 7], 3), first_value([1, 2, 3], 3), atol=1e-6)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_both_ways_of_recurrence_and_compilation_give_the_same(arrays, options):
    batch, results = pairs(4), []
    for recurrence in ("fused", "steps"):
        for hybridize in (False, True):
            net = small_model(mx.cpu(), hybridize, recurrence=recurrence, **options)
            losses, gradients = passed_back(net, SequenceLoss(0.1), batch, arrays)
            assert all(np.abs(gradient).max() > 0 for gradient in gradients)  # every parameter takes part
            results.append([losses, *gradients])
    for result in results[1:]:
        assert largest_difference(result, results[0]) < 1e-5


@pytest.mark.parametrize(
    ("options", "is_whole"),
    [({}, True), ({"num_layers": 2, "cell": "lstm"}, True), ({"recurrence": "steps"}, False), ({"input_feeding": True}, False)],
)
def test_it_is_compiled_whole_where_all_steps_are_taken_at_once(options, is_whole):
    calls = []
    net = small_model(mx.cpu(), hybridize=True, **options)
    net.output.register_forward_hook(lambda *_: calls.append(1))
    X, _ = on_device(pairs(3), mx.nd)
    for _ in range(3):
        net(X).wait_to_read()
    assert (net._cached_op is not None) == is_whole
    assert len(calls) <= 1 if is_whole else len(calls) == 3  # a layer of a graph is called while it is made, and not again


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=["plain", "static"])
def test_predictions_are_differentiated_as_uncompiled(flags):
    """Before training and after it: of a static graph, MXNet would give gradients of the last training."""
    X, _ = on_device(pairs(3), mx.nd)
    gradients = []
    for compiles in (False, True):
        net, found = small_model(mx.cpu(), num_layers=2), []
        if compiles:
            net.hybridize(**flags)
        for is_training in (False, True, False):
            with autograd.record(train_mode=is_training):
                scores = net(X)
            scores.backward(train_mode=is_training)
            found += [param.grad().asnumpy() for param in net.collect_params().values()]
        gradients.append(found)
    assert largest_difference(*gradients) < 1e-6


def test_a_compiled_block_around_it_is_refused():
    class Around(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.net = small_model(mx.cpu())

        def hybrid_forward(self, F, *X):
            return self.net(*X)

    around = Around()
    X, _ = on_device(pairs(3), mx.nd)
    np.testing.assert_array_equal(around(*X).asnumpy(), around.net(*X).asnumpy())
    around.hybridize()
    with pytest.raises(TrainerError, match="got symbols") as caught:
        around(*X)
    assert_house_style(caught.value)


def test_few_operations_keep_the_recurrent_operator_from_others_unless_asked_for():
    net = small_model(mx.cpu(), hybridize=True)
    flags = dict(net._flags)
    assert (flags["forward_bulk_size"], flags["backward_bulk_size"]) == (4, 4)
    net.hybridize(forward_bulk_size=15)
    flags = dict(net._flags)
    assert (flags["forward_bulk_size"], flags["backward_bulk_size"]) == (15, 4)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_step_by_step_is_all_at_once(options):
    """Decoding one token after the other, with the state of the last, gives the scores of teacher forcing."""
    net = small_model(mx.cpu(), **options)
    (source, lengths, target), _ = on_device(pairs(3), mx.nd)
    at_once = net((source, lengths, target)).asnumpy()
    state, memory = net.encode(source, lengths)
    for t in range(target.shape[1]):
        scores, state, weights = net.decode(target[:, t : t + 1], state, memory)
        np.testing.assert_allclose(scores.asnumpy()[:, 0], at_once[:, t], atol=2e-6)
        np.testing.assert_allclose(weights.asnumpy().sum(axis=1), 1, atol=1e-6)


def test_one_argument_or_three_and_both_layouts():
    X, _ = on_device(pairs(3), mx.nd)
    expected = small_model(mx.cpu())(X).asnumpy()
    np.testing.assert_array_equal(small_model(mx.cpu())(*X).asnumpy(), expected)
    turned = small_model(mx.cpu(), layout="TNC")((X[0].T, X[1], X[2].T))
    np.testing.assert_allclose(turned.asnumpy(), expected.swapaxes(0, 1), atol=2e-6)


def test_parameters_are_interchangeable(tmp_path, arrays):
    """Saved by one device's fused network, loaded by a step-by-step one on two: no name knows of the way."""
    X = on_device(pairs(3)[0], arrays)
    net = small_model(mx.cpu(), recurrence="fused", tied=True)
    net.save_parameters(str(tmp_path / "net.params"))
    other = Seq2Seq(SOURCE_VOCAB, TARGET_VOCAB, embed_size=6, hidden_size=6, recurrence="steps", tied=True)
    other.load_parameters(str(tmp_path / "net.params"), ctx=[mx.cpu(0), mx.cpu(1)])
    np.testing.assert_allclose(other(X).asnumpy(), net(X).asnumpy(), atol=1e-6)


def test_tied_weights_are_one_array():
    net = small_model(mx.cpu(), tied=True)
    assert net.output.weight is net.target_embedding.weight
    assert len(list(net.collect_params())) == len(list(small_model(mx.cpu()).collect_params())) - 1


def test_dropout_is_for_training_alone():
    net = small_model(mx.cpu(), dropout=0.5)
    X, _ = on_device(pairs(3), mx.nd)
    np.testing.assert_array_equal(net(X).asnumpy(), small_model(mx.cpu())(X).asnumpy())
    with autograd.record():
        assert np.abs(net(X).asnumpy() - net(X).asnumpy()).max() > 1e-3


# ---- the loss


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", ["NTC", "TNC"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_numpy(arrays, smoothing, layout):
    rng = np.random.RandomState(0)
    scores = rng.randn(4, 6, TARGET_VOCAB).astype("float32")
    _, (tokens, lengths) = pairs(4)
    expected = np.zeros(4)
    for n in range(4):
        for t in range(lengths[n]):
            log_p = scores[n, t] - np.log(np.exp(scores[n, t]).sum())
            wanted = np.full(TARGET_VOCAB, smoothing / TARGET_VOCAB)
            wanted[tokens[n, t]] += 1 - smoothing
            expected[n] -= wanted @ log_p
    loss = SequenceLoss(smoothing, layout=layout)
    label = on_device((tokens if layout == "NTC" else tokens.T, lengths), arrays)
    got = loss(arrays.array(scores if layout == "NTC" else scores.swapaxes(0, 1)), label)
    assert isinstance(got, mx.np.ndarray) == (arrays is mx.np)
    np.testing.assert_allclose(got.asnumpy(), expected, rtol=1e-5)
    assert loss.num_units((tokens, lengths)) == loss.num_units(label) == lengths.sum()


def test_smoothing_is_for_training_only():
    """`fit` and `evaluate` report cross-entropy, so that runs of any smoothing compare, also with compiled passes."""
    X, y = pairs(4)
    found = []
    for smoothing, compiled in ((0.0, "off"), (0.3, "off"), (0.3, "on")):
        net = small_model([mx.cpu()], True)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})
        loss = SequenceLoss(smoothing)
        history = mgpu.fit(net, loss, trainer, [(X, y)], [(X, y)], epochs=1, metrics=(), callbacks=[], compiled=compiled)
        row = history.rows[0]
        assert row["test_loss"] == pytest.approx(mgpu.evaluate(net, [(X, y)], metrics=(), loss=loss)["loss"], rel=1e-5)
        found.append((row["train_loss"], row["test_loss"]))
    plain, smoothed, compiled = found
    assert plain[0] == pytest.approx(plain[1], rel=1e-5)
    assert smoothed[0] != pytest.approx(plain[0], rel=1e-3)
    assert smoothed == pytest.approx(compiled, rel=1e-5) and smoothed[1] == pytest.approx(plain[1], rel=1e-5)


# ---- the beginning


def test_the_output_layer_begins_at_given_probabilities(devices):
    log_p = np.log(np.arange(1, TARGET_VOCAB + 1) / sum(range(TARGET_VOCAB + 1)))
    for tied in (False, True):
        net = Seq2Seq(SOURCE_VOCAB, TARGET_VOCAB, embed_size=4, hidden_size=4, tied=tied)
        net.begin_at(log_p)
        net.initialize(mx.init.Xavier(), ctx=devices)
        for context in devices:
            np.testing.assert_allclose(net.output.bias.data(context).asnumpy(), log_p, rtol=1e-6)
    for wrong in (log_p[1:], 0.5):
        with pytest.raises(TrainerError, match=r"Seq2Seq.begin_at: got log_p of shape .*; expected \(") as caught:
            net.begin_at(wrong)
        assert_house_style(caught.value)


@pytest.mark.parametrize("cell, num_gates", [("gru", 3), ("lstm", 4)])
def test_recurrent_matrices_begin_orthogonal(arrays, cell, num_gates):
    layer = Recurrence(cell, 6, 4)
    layer.initialize(mx.init.Xavier())
    gates = layer.h2h_weight.data().asnumpy().reshape((num_gates, 6, 6))
    for gate in gates:
        np.testing.assert_allclose(gate @ gate.T, np.eye(6), atol=1e-5)
    assert np.abs(gates[0] - gates[1]).max() > 0.1


# ---- training


def trained(ctx, sizes, layout="NTC", **options):
    """Five steps by hand, each divided by the target tokens of the whole batch."""
    net, loss = small_model(ctx, True, layout=layout, **options), SequenceLoss(0.1, layout=layout)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    axes = ((0, 0, 0), (0, 0)) if layout == "NTC" else ((1, 0, 1), (1, 0))
    split = functools.partial(mgpu.split_batch, batch_axis=axes)
    for seed, size in enumerate(sizes):
        X, y = pairs(size, layout, seed)
        Xs, ys = split(X, y, trainer.contexts)
        with autograd.record():
            losses = [loss(net(features), label) for features, label in zip(Xs, ys)]
        mgpu.backward(losses)
        trainer.step(loss.num_units(y))
    assert mgpu.replica_difference(net) == 0
    return net


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", ["NTC", "TNC"])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_devices_do_not_show_in_the_weights(arrays, options, layout):
    """One device with the one operator, and three by steps: even, uneven, and fewer sentences than devices."""
    sizes = [6, 7, 2, 1, 5]
    one = weights_of(trained([mx.cpu(0)], sizes, layout, **options))
    three = weights_of(trained([mx.cpu(i) for i in range(3)], sizes, layout, recurrence="steps", **options))
    assert largest_difference(one, three) < 1e-5
    assert largest_difference(one, weights_of(small_model([mx.cpu(0)], **options))) > 1e-3


def test_a_step_does_not_wait(waits, arrays):  # noqa: F811
    trained([mx.cpu(0), mx.cpu(1)], [3])
    net, loss = small_model([mx.cpu(0), mx.cpu(1)]), SequenceLoss()
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    X, y = pairs(5)
    del waits[:]
    Xs, ys = mgpu.split_batch(X, y, trainer.contexts)
    with autograd.record():
        losses = [loss(net(features), label) for features, label in zip(Xs, ys)]
    mgpu.backward(losses)
    trainer.step(loss.num_units(y))
    assert waits == []


# ---- wrong arguments


@pytest.mark.parametrize(
    "options, told",
    [
        ({"source_vocab_size": 0}, "source_vocab_size=0"),
        ({"hidden_size": 2.5}, "hidden_size=2.5"),
        ({"num_layers": True}, "num_layers=True"),
        ({"cell": "rnn"}, "cell='rnn'"),
        ({"attention": "position"}, "attention='position'"),
        ({"layout": "CTN"}, "layout='CTN'"),
        ({"recurrence": "foreach"}, "recurrence='foreach'"),
        ({"dropout": 1}, "dropout=1"),
        ({"tied": True, "embed_size": 4, "hidden_size": 8}, "embed_size=4 and hidden_size=8"),
    ],
)
def test_a_model_that_cannot_be_made(options, told):
    with pytest.raises(TrainerError, match=told) as caught:
        Seq2Seq(**{"source_vocab_size": 5, "target_vocab_size": 5, **options})
    assert_house_style(caught.value)


def test_inputs_of_other_forms():
    net = small_model(mx.cpu())
    source, lengths, target = on_device(pairs(3)[0], mx.nd)
    for wrong in (
        (source, lengths),
        (source, target, lengths),
        (source[:2], lengths, target),
        (source.T, lengths, target),
        source,
    ):
        with pytest.raises(TrainerError, match=r"Seq2Seq: got .*expected \(source, lengths, target\)") as caught:
            net(wrong)
        assert_house_style(caught.value)


def test_a_loss_that_cannot_be_made_or_computed():
    for make in (
        lambda: SequenceLoss(1.0),
        lambda: SequenceLoss(layout="NT"),
        lambda: SequenceLoss()(mx.nd.ones((2, 3, 4)), mx.nd.ones((2, 3))),
        lambda: SequenceLoss().num_units((np.ones(2),) * 3),
    ):
        with pytest.raises(TrainerError) as caught:
            make()
        assert_house_style(caught.value)


@pytest.mark.pairwise
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("layout", ["NTC", "TNC"])
def test_train_batch_divides_by_target_tokens(devices, layout, micro_steps):
    """The loop by hand on one device, and train_batch on several, also in parts; evaluate's loss is the mean over tokens."""
    sizes = [6, 7, 2, 1, 5]
    net, loss = small_model(devices, layout=layout), SequenceLoss(0.1, layout=layout)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    split = functools.partial(mgpu.split_batch, batch_axis=((1, 0, 1), (1, 0)) if layout == "TNC" else 0)
    batches = [pairs(size, layout, seed) for seed, size in enumerate(sizes)]
    for X, y in batches:
        mgpu.train_batch(net, loss, trainer, X, y, split_f=split, micro_steps=micro_steps)
    assert largest_difference(weights_of(trained([mx.cpu(0)], sizes, layout)), weights_of(net)) < 1e-5
    total = sum(loss.evaluation(net(on_device(X, mx.nd)), on_device(y, mx.nd)).asnumpy().sum() for X, y in batches)
    mean = total / sum(lengths.sum() for _, (_, lengths) in batches)
    assert mgpu.evaluate(net, batches, (), loss=loss, split_f=split)["loss"] == pytest.approx(mean, rel=1e-5)


class Scaled(Seq2Seq):
    """A user's subclass: what the decoder looks back at is scaled, and scores are turned round."""

    def encode(self, source, lengths):
        state, (keys, values, lengths) = super().encode(source, lengths)
        return state, (keys, values * 3, lengths)

    def decode(self, target, state, memory):
        scores, state, weights = super().decode(target, state, memory)
        return -scores, state, weights


@pytest.mark.pairwise
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("feeding", [False, True])
def test_a_subclass_is_asked_in_training_as_in_translation(arrays, hybridize, feeding):
    """Its `encode` and `decode` were called to translate alone: it was trained as another network."""
    net = Scaled(9, 8, embed_size=4, hidden_size=5, input_feeding=feeding)
    net.initialize(mx.init.Uniform(0.7))
    if hybridize:
        net.hybridize()
    source, target = arrays.array([[1, 2, 3], [4, 5, 0]]), arrays.array([[1, 2], [3, 4]])
    lengths = arrays.array([3, 2], dtype="int32")
    before = net((source, lengths, target)).asnumpy()
    state, memory = net.encode(source, lengths)
    assert largest_difference([before], [net.decode(target, state, memory)[0].asnumpy()]) == 0.0
    plain = Seq2Seq(9, 8, embed_size=4, hidden_size=5, input_feeding=feeding, params=net.collect_params(), prefix=net.prefix)
    assert largest_difference([before], [plain((source, lengths, target)).asnumpy()]) > 1e-3

    class Loss(gluon.loss.Loss):
        def hybrid_forward(self, F, scores, target):
            return scores.sum(axis=(1, 2))

    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    mgpu.train_batch(net, Loss(1.0, 0), trainer, (source, lengths, target), target)
    after = net((source, lengths, target)).asnumpy()
    assert after.sum() < before.sum()  # what the subclass computes has become less
