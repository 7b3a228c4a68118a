"""Workloads of tests/test_batch_size.py: each probe imports this file, which therefore imports little."""

import os
import resource
import subprocess
import sys
import time

import gluon_mgpu as mgpu
import mxnet as mx
from mxnet import gluon


def small_mlp(batch_size, ctx):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="relu"), gluon.nn.Dense(3))
    net.initialize(ctx=ctx)
    array = mx.np if mx.util.is_np_array() else mx.nd
    X, y = array.ones((batch_size, 4)), array.zeros((batch_size,))
    return net, gluon.loss.SoftmaxCrossEntropyLoss(), mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}), X, y


def bad_alloc(batch_size, ctx):
    def step():
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
        os.abort()

    return step


def mxnet_allocation(batch_size, ctx):
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
    return lambda: mx.nd.ones((1024, 1024, 1024)).wait_to_read()


def value(batch_size, ctx):
    def step():
        raise ValueError("the data holds\n7 examples")

    return step


def hang(batch_size, ctx):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "left behind by a probe"])
    return lambda: time.sleep(600)
