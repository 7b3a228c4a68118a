import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.models.seq2seq.attention import Attention
from gluon_mgpu.models.seq2seq.network import Seq2Seq
from gluon_mgpu.models.seq2seq.recurrent_layer import Recurrence
from gluon_mgpu.models.seq2seq.sequence_loss import SequenceLoss
from mxnet import autograd, gluon

from .conftest import initialized, largest_difference, weights_of
from .versions import with_prefix

SOURCE_VOCAB, TARGET_VOCAB = 9, 11
MODELS = {
    "gru dot": {},
    "lstm additive": {"cell": "lstm", "attention": "additive", "num_layers": 2},
    "lstm dot tied": {"cell": "lstm", "tied": True, "num_layers": 2},
}


def small_model(ctx, hybridize=False, **options):
    mx.random.seed(0)
    net = initialized(Seq2Seq(SOURCE_VOCAB, TARGET_VOCAB, embed_size=6, hidden_size=6, **options), ctx, mx.init.Uniform(0.5))
    if hybridize:
        net.hybridize()
    return net


def pairs(num, seed=0):
    """A batch as the data side makes it: lengths of all kinds, padding of 0, host arrays."""
    rng = np.random.RandomState(seed)
    source_lengths, target_lengths = rng.randint(1, 6, num), rng.randint(1, 7, num)
    source = rng.randint(1, SOURCE_VOCAB, (num, 5)) * (np.arange(5) < source_lengths[:, None])
    output = rng.randint(1, TARGET_VOCAB, (num, 6)) * (np.arange(6) < target_lengths[:, None])
    given = np.concatenate([np.ones((num, 1), int), output[:, :-1]], axis=1)
    arrays = [array.astype("int32") for array in (source, given, output)]
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


@pytest.mark.mxnet1("legacy arrays")
@pytest.mark.parametrize("recurrence", ["fused", "steps"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_recurrence_is_gluon_s_cell(cell, recurrence):
    """Gluon's cell, unrolled, has the same parameters and gives the same."""
    theirs = with_prefix(gluon.rnn.GRUCell if cell == "gru" else gluon.rnn.LSTMCell, "theirs_", hidden_size=4, input_size=3)
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


@pytest.mark.mxnet1("legacy arrays")
@pytest.mark.parametrize("kind", ["dot", "additive"])
def test_attention_is_what_the_papers_write(kind):
    rng = np.random.RandomState(0)
    queries, keys, values = rng.randn(2, 3, 4), rng.randn(2, 5, 4), rng.randn(2, 5, 6)
    lengths = [5, 2]
    layer = initialized(Attention(kind, 4, 6), init=mx.init.Uniform(1))
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


@pytest.mark.each_value
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


# ---- the loss


@pytest.mark.pairwise
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_numpy(arrays, smoothing):
    scores = np.random.RandomState(0).randn(4, 6, TARGET_VOCAB).astype("float32")
    _, (tokens, lengths) = pairs(4)
    expected = np.zeros(4)
    for n in range(4):
        for t in range(lengths[n]):
            log_p = scores[n, t] - np.log(np.exp(scores[n, t]).sum())
            wanted = np.full(TARGET_VOCAB, smoothing / TARGET_VOCAB)
            wanted[tokens[n, t]] += 1 - smoothing
            expected[n] -= wanted @ log_p
    loss = SequenceLoss(smoothing)
    label = on_device((tokens, lengths), arrays)
    got = loss(arrays.array(scores), label)
    assert isinstance(got, mx.np.ndarray) == (arrays is mx.np)
    np.testing.assert_allclose(got.asnumpy(), expected, rtol=1e-5)
    assert loss.num_units((tokens, lengths)) == loss.num_units(label) == lengths.sum()


@pytest.mark.mxnet1("compiled passes")
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
        with pytest.raises(TrainerError):
            net.begin_at(wrong)


# ---- training


def trained(ctx, sizes, **options):
    """Five steps by hand, each divided by the target tokens of the whole batch."""
    net, loss = small_model(ctx, True, **options), SequenceLoss(0.1)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    for seed, size in enumerate(sizes):
        X, y = pairs(size, seed)
        Xs, ys = mgpu.split_batch(X, y, trainer.contexts)
        with autograd.record():
            losses = [loss(net(features), label) for features, label in zip(Xs, ys)]
        trainer.backward(losses)
        trainer.step(loss.num_units(y))
    assert mgpu.replica_difference(net) == 0
    return net


@pytest.mark.each_value
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_devices_do_not_show_in_the_weights(arrays, options):
    """One device with the one operator, and three by steps: even, uneven, and fewer sentences than devices."""
    sizes = [6, 7, 2, 1, 5]
    one = weights_of(trained([mx.cpu(0)], sizes, **options))
    three = weights_of(trained([mx.cpu(i) for i in range(3)], sizes, recurrence="steps", **options))
    assert largest_difference(one, three) < 1e-5
    assert largest_difference(one, weights_of(small_model([mx.cpu(0)], **options))) > 1e-3


# ---- wrong arguments


@pytest.mark.parametrize(
    "options, told",
    [
        ({"source_vocab_size": 0}, "source_vocab_size=0"),
        ({"cell": "rnn"}, "cell='rnn'"),
        ({"dropout": 1}, "dropout=1"),
        ({"tied": True, "embed_size": 4, "hidden_size": 8}, "embed_size=4 and hidden_size=8"),
    ],
)
def test_a_model_that_cannot_be_made(options, told):
    with pytest.raises(TrainerError, match=told):
        Seq2Seq(**{"source_vocab_size": 5, "target_vocab_size": 5, **options})


@pytest.mark.each_value
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_train_batch_divides_by_target_tokens(devices, micro_steps):
    """The loop by hand on one device, and train_batch on several, also in parts; evaluate's loss is the mean over tokens."""
    sizes = [6, 7, 2, 1, 5]
    net, loss = small_model(devices), SequenceLoss(0.1)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    batches = [pairs(size, seed) for seed, size in enumerate(sizes)]
    for X, y in batches:
        mgpu.train_batch(net, loss, trainer, X, y, micro_steps=micro_steps)
    assert largest_difference(weights_of(trained([mx.cpu(0)], sizes)), weights_of(net)) < 1e-5
    total = sum(loss.evaluation(net(on_device(X, mx.nd)), on_device(y, mx.nd)).asnumpy().sum() for X, y in batches)
    mean = total / sum(lengths.sum() for _, (_, lengths) in batches)
    assert mgpu.evaluate(net, batches, (), loss=loss)["loss"] == pytest.approx(mean, rel=1e-5)
