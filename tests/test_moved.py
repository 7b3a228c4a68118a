"""Modules by their former names: they work for one release, and warn."""

import importlib
import json
import pickle
import sys
from pathlib import Path

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.models.seq2seq.callbacks import PlateauSchedule
from gluon_mgpu.moved import MOVED, current_class, current_module
from mxnet import gluon

# Written by the last commit before the move: the weights, and a trainer whose files name the classes where they were then.
BEFORE = Path(__file__).parent / "data" / "before_rooms"


@pytest.fixture
def fresh():
    """Former names are imported anew, and forgotten afterwards."""
    before = set(sys.modules), set(vars(mgpu))

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[2] in MOVED]:
            del sys.modules[name]
        for name in [name for name in vars(mgpu) if name in MOVED]:
            delattr(mgpu, name)

    forget()
    yield
    forget()
    assert set(vars(mgpu)) <= before[1]


def test_a_former_name_is_the_module(fresh):
    for old, new in MOVED.items():
        with pytest.warns(DeprecationWarning, match=rf"gluon_mgpu\.{old} is now gluon_mgpu\.{new}\. "):
            module = importlib.import_module(f"gluon_mgpu.{old}")
        assert module is importlib.import_module(f"gluon_mgpu.{new}")
        assert module.__spec__.name == module.__name__ == f"gluon_mgpu.{new}"


def test_names_that_documentation_showed(fresh):
    with pytest.warns(DeprecationWarning) as caught:
        from gluon_mgpu.processes import group
        from gluon_mgpu.translator_callbacks import TokenProgress
    assert {warning.filename for warning in caught} == {__file__}
    assert group is mgpu.distributed.group and TokenProgress.__module__ == "gluon_mgpu.models.seq2seq.callbacks"
    from gluon_mgpu.devices import describe_devices, usable_gpus
    from gluon_mgpu.models.seq2seq import Seq2Seq
    from gluon_mgpu.trainer import Trainer

    assert (describe_devices, Trainer, Seq2Seq) == (mgpu.describe_devices, mgpu.Trainer, mgpu.models.Seq2Seq)
    assert callable(usable_gpus)


def test_an_attribute_of_the_package(fresh):
    with pytest.warns(DeprecationWarning, match=r"gluon_mgpu\.sharding is now") as caught:
        assert mgpu.sharding.plan_shards is mgpu.plan_shards
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="'gluon_mgpu' has no attribute 'nothing'"):
        _ = mgpu.nothing


def test_functions_keep_their_names():
    """`fit` and `prefetch` were modules as well; a module of that name would hide the function."""
    assert callable(mgpu.fit) and callable(mgpu.prefetch) and not {"fit", "prefetch"} & set(MOVED)


def test_classes_of_older_pickles_are_found(fresh):
    with pytest.warns(DeprecationWarning):
        assert pickle.loads(b"cgluon_mgpu.optimizers\nAdamW\n.").__module__ == "gluon_mgpu.trainer.optimizers"
    assert current_class("gluon_mgpu.translator_callbacks.PlateauSchedule").startswith("gluon_mgpu.models.seq2seq.callbacks.")
    assert current_module("mxnet.optimizer") == "mxnet.optimizer"


@pytest.mark.filterwarnings("error:gluon_mgpu:DeprecationWarning")
@pytest.mark.parametrize("how", ["checkpoint", "states"])
def test_files_written_before_the_move_resume_bit_for_bit(how, fresh):
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    options = {"learning_rate": 0.1, "lr_scheduler": PlateauSchedule(0.1), "wd": 0.01}
    trainer = mgpu.Trainer(net.collect_params(), "adamw", options)
    if how == "checkpoint":
        mgpu.load_checkpoint(BEFORE / "run" / "last", net, trainer)
    else:
        net.load_parameters(str(BEFORE / "net.params"), ctx=[mx.cpu(0), mx.cpu(1)])
        trainer.load_states(str(BEFORE / "trainer.states"))
    x = np.arange(24, dtype="float32").reshape(8, 3) / 24
    y = (x @ np.array([[1.0], [-2.0], [0.5]], "float32"))[:, 0]
    loader = mgpu.data.ArrayLoader(x, y, batch_size=4)
    mgpu.fit(net, gluon.loss.L2Loss(), trainer, loader, epochs=2, metrics=(), callbacks=[])
    expected = json.loads((BEFORE / "expected.json").read_text())
    for name, param in net._collect_params_with_prefix().items():
        for replica in param.list_data():
            assert replica.asnumpy().tolist() == expected[name]
