"""The generators of random numbers: where they are is plain text, and they go on from there."""

import json
import random
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint import snapshot
from gluon_mgpu.checkpoint.random_state import draw_base, random_state, seed_of, set_random_state
from mxnet.gluon import nn


def drawn():
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.uniform(), np.random.permutation(9).tolist()]


@pytest.mark.parametrize("before", range(4))
def test_they_go_on_from_a_text(before):
    """After an odd number of normal ones, both have the second of a pair in hand."""
    for _ in range(before):
        random.gauss(0, 1), np.random.normal()
    text = json.dumps(random_state())
    expected = [drawn() for _ in range(300)]  # more than the 624 numbers that one turn gives
    random.seed(1), np.random.seed(1)
    set_random_state(json.loads(text))
    assert [drawn() for _ in range(300)] == expected


def test_seeds_differ_by_base_step_and_process():
    seeds = {seed_of(base, step, rank) for base in range(5) for step in range(50) for rank in range(4)}
    assert len(seeds) == 5 * 50 * 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(1, 2) == seed_of(1, 2, 0)


def test_the_base_follows_the_programs_seed():
    found = []
    for seed in (4, 4, 5):
        mx.random.seed(seed)
        found.append(draw_base(mx.cpu(0)))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("draw_alike, virtual_shards", [(True, None), (False, None), (False, 2)])
def test_a_checkpoint_keeps_the_numbers_of_processes_alike_or_apart(become, draw_alike, virtual_shards):
    """Each process went on with numbers of its own: they shuffled the data in other orders."""
    net = nn.Dense(1, in_units=1)
    net.initialize()
    trainer = mgpu.Trainer(net, "sgd", virtual_shards=virtual_shards)
    processes = SimpleNamespace(all_gather_bytes=lambda own: [own, own if draw_alike else b"7"])
    found = set()
    for rank in range(2):
        become(processes, rank)
        mx.random.seed(0)
        snapshot.take_snapshot(net, trainer)
        found.add(float(mx.nd.random.uniform(shape=1).asscalar()))
    assert len(found) == (1 if draw_alike or virtual_shards else 2)
