"""Programs put together at random, as users put them together."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, Dict, List, Optional, Sequence, Tuple

from _models import MODELS, Model
from _program import Program
from _statements import (
    AddMode,
    ClipWeights,
    Copied,
    Discard,
    Fit,
    Flush,
    Follow,
    Freeze,
    Group,
    Hybridize,
    Look,
    Move,
    Multiply,
    NewTrainer,
    Parallel,
    Pass,
    Rate,
    SetData,
    Statement,
    Step,
    TrainBatch,
    ZeroGrad,
)
from _worlds import Options, Setting

# Each with its usual options; those that draw noise or divide by nearly nothing have fewer.
_OPTIMIZERS: List[Tuple[str, List[Options]]] = [
    (
        "sgd",
        [{"learning_rate": 0.1}, {"learning_rate": 0.1, "momentum": 0.9}, {"learning_rate": 0.1, "momentum": 0.8, "wd": 0.01}],
    ),
    (
        "sgd",
        [{"learning_rate": 0.1, "momentum": 0.9, "wd": 0.05, "lazy_update": False}, {"learning_rate": 0.2, "clip_gradient": 0.1}],
    ),
    ("adam", [{"learning_rate": 0.01}, {"learning_rate": 0.02, "wd": 0.01}, {"learning_rate": 0.01, "lazy_update": False}]),
    ("adamw", [{"learning_rate": 0.01, "wd": 0.1}]),
    ("nag", [{"learning_rate": 0.1, "momentum": 0.9}]),
    ("rmsprop", [{"learning_rate": 0.01}, {"learning_rate": 0.01, "centered": True}]),
    ("adagrad", [{"learning_rate": 0.05}]),
    ("adadelta", [{"learning_rate": 1.0, "epsilon": 1e-3}]),
    ("adamax", [{"learning_rate": 0.01}]),
    ("nadam", [{"learning_rate": 0.01}]),
    ("ftrl", [{"learning_rate": 0.1, "lamda1": 0.001}]),
    ("ftml", [{"learning_rate": 0.01}]),
    ("lamb", [{"learning_rate": 0.01}]),
    ("lars", [{"learning_rate": 0.5, "momentum": 0.9}]),
    (
        "lbsgd",
        [{"learning_rate": 0.05, "momentum": 0.9, "warmup_strategy": "linear", "warmup_epochs": 1, "updates_per_epoch": 4}],
    ),
    ("lbsgd", [{"learning_rate": 0.05, "warmup_strategy": "lars"}, {"learning_rate": 0.05, "batch_scale": 2}]),
    ("signum", [{"learning_rate": 0.01, "momentum": 0.9}]),
    ("dcasgd", [{"learning_rate": 0.05}]),  # MXNet cannot make its momentum
    ("sgld", [{"learning_rate": 0.01}]),
    ("test", [{"learning_rate": 0.1}]),
]
_FLAGS: List[Optional[Options]] = [None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]
_COMMON = ("sgd", "adam")
_SHARDED = ("sgd", "adam", "adamw", "nag", "rmsprop", "adagrad", "adadelta", "adamax", "ftrl", "ftml", "lamb")


class Composer:
    """Makes one program.

    Parameters
    ----------
    seed : int
    models : sequence of str
    """

    def __init__(self, seed: int, models: Sequence[str] = tuple(MODELS)) -> None:
        self.random = Random(seed)
        self.arrays = self.random.choice(["nd", "np"])
        names = [name for name in models if not (name == "sparse" and self.arrays == "np")]
        self.name = self.random.choices(names, [4 if name in ("gan", "sparse", "heads", "branches") else 2 for name in names])[0]
        self.model: Model = MODELS[self.name]()
        self.num_devices = self.random.choices(range(1, 9), [3, 6, 6, 4, 2, 1, 1, 2])[0]
        # A static graph that one pass uses twice, and the next one once, gives wrong gradients, also in MXNet on one device.
        self.flags = _FLAGS[:3] if self.name == "gan" else _FLAGS
        self.optimizer = self._optimizer()
        self.is_local = False
        self.adds = False
        self.unused = "" if not self.model.unreached else self.random.choice(["find", "ignore"])

    def program(self) -> Program:
        """Return it."""
        setting = self._setting()
        statements: List[Statement] = []
        if self.adds:
            statements.append(AddMode())
        if self.random.random() < 0.1 and self.model.hybrid:
            statements.append(Copied(self._net(), teacher=True))
            self.has_teacher = True
        for _ in range(self.random.randint(3, 7)):
            statements += self._unit()
            if self.random.random() < 0.3:
                statements += self._change(setting)
        return Program(setting, tuple(statements + self._end()))

    def _optimizer(self) -> Tuple[str, Options]:
        common = self.random.random() < 0.5
        kinds = [one for one in _OPTIMIZERS if not common or one[0] in _COMMON]
        name, options = self.random.choice(kinds)
        return name, dict(self.random.choice(options))

    def _setting(self) -> Setting:
        choice, chance = self.random.choice, self.random.random
        trainer: Dict[str, Any] = {}
        if chance() < 0.2:
            trainer["clip_norm"] = choice([0.05, 0.3, 2.0])
        if chance() < 0.1:
            trainer["clip_value"] = choice([0.01, 0.1])
        if chance() < 0.1 and not self.model.unreached:
            trainer["static_graph"] = True
        if self.unused == "find" or chance() < 0.05:
            trainer["find_unused_parameters"] = True
        if chance() < 0.1:
            trainer["bucket_bytes"] = choice([1, 64, 200])
        if (
            chance() < 0.08
            and self.optimizer[0] in ("sgd", "nag")
            and not trainer
            and self.name in ("mlp", "conv", "tied", "deep")
        ):
            trainer = {"every": 1}
            self.is_local = True
            self.optimizer[1].pop("clip_gradient", None)
        elif chance() < 0.1 and self.optimizer[0] in _SHARDED:
            trainer["shard_optimizer"] = True
        self.is_sharded = "shard_optimizer" in trainer
        self.static = "static_graph" in trainer
        # AdamW and AdaDelta scale the gradient in place, so that later gradients are added to another value, as in Gluon.
        scales = self.optimizer[0] in ("adamw", "adadelta")
        self.adds = (
            chance() < 0.08
            and not trainer
            and not scales
            and self.name not in ("sparse", "gan", "heads", "branches", "shapeless")
        )
        scheduled = chance() < 0.25 and self.name not in ("gan", "halves")
        return Setting(
            self.name,
            self.random.randint(0, 10**6),
            self.num_devices,
            self.arrays,
            dtype="float64" if chance() < 0.06 and self.name in ("mlp", "conv", "regression", "deep", "tied") else "float32",
            optimizer=self.optimizer,
            trainer=trainer,
            passed_as=choice(["block", "block", "dict", "list"]),
            hybridize=choice(self.flags) if self.model.hybrid else None,
            schedule=choice(["factor", "cosine", "multi"]) if scheduled else "",
        )

    def _net(self) -> str:
        names = sorted({net for nets in self.model.nets_of.values() for net in nets})
        return self.random.choice(names)

    def _seed(self) -> int:
        return self.random.randint(0, 10**6)

    def _num(self) -> int:
        """Return a batch size: often fewer than devices, often one."""
        if self.name == "batchnorm":
            return self.random.choice([1, 3, 4])
        return self.random.choice(
            [1, 1, 2, 3, self.num_devices, 2 * self.num_devices, self.random.randint(1, 3 * self.num_devices)]
        )

    def _shares(self, num: int) -> Tuple[int, ...]:
        if self.name == "batchnorm":
            return (1, 0, 0, 0, 0, 0, 0, 0)
        if self.model.by_shard or self.random.random() > 0.15:
            return ()
        return self.random.choice([(1, 0), (0, 1), (1, 2), (3, 1, 1), (0, 0, 1)])

    def _pass(self, what: Optional[str] = None) -> Pass:
        num = self._num()
        how = self.random.choice(["split_batch", "split_batch", "split_and_load", "gluon", "prefetch"])
        back = self.random.choice(["mgpu", "mgpu", "autograd", "each"])
        if self.name == "batchnorm" and how == "gluon":
            how = "split_batch"
        # With one call per device, two batches that share no device cannot be told from one batch.
        shares = self._shares(num) if back == "mgpu" or self.name == "batchnorm" else ()
        return Pass(what or self._what(), num, self._seed(), how, back, shares)

    def _what(self) -> str:
        return self.random.choice(list(self.model.losses))

    def _step(self, what: str) -> Step:
        forms = ["step", "step", "step"] if self.is_local or self.is_sharded else ["step", "step", "halves"]
        if self.unused == "find":
            forms = ["step"]
        unreached = what in self.model.unreached or self.random.random() < 0.05
        form = "ignore" if self.unused != "find" and unreached else self.random.choice(forms)
        return Step(self.model.trained_by[what], form)

    def _unit(self) -> List[Statement]:
        kinds = {
            self._by_hand: 10,
            self._in_one_call: 4,
            self._left_out: 3 if not self.adds else 0,
            self._accumulated: 3 if not self.adds else 0,
            self._replaced: 1 if not self.adds and not self.is_local else 0,
            self._epochs: 1 if not self.adds and self.name != "batchnorm" else 0,
            self._parallel: 1 if not self.adds and self.name != "batchnorm" else 0,
            self._wasserstein: 4 if self.name == "gan" else 0,
        }
        return self.random.choices(list(kinds), list(kinds.values()))[0]()

    def _by_hand(self) -> List[Statement]:
        one = self._pass()
        statements: List[Statement] = [one, self._step(one.what)]
        if self.name == "halves" and self.random.random() < 0.8:
            statements.append(Step("upper", statements[-1].form))  # type: ignore[attr-defined]
        if self.adds and self.random.random() < 0.5:
            statements.append(ZeroGrad())
        return statements

    def _in_one_call(self) -> List[Statement]:
        if self.name == "halves":
            return self._by_hand()
        what = self.random.choice(list(self.model.whole))
        num = self._num()
        micro_steps = self.random.choice([1, 1, 2, 3]) if not self.adds else 1
        return [TrainBatch(what, num, self._seed(), micro_steps, self._shares(num), self.unused == "ignore")]

    def _left_out(self) -> List[Statement]:
        one = self._pass()
        statements: List[Statement] = [one]
        if self.random.random() < 0.4:
            statements.append(Discard(self.model.trained_by[one.what]))
        return statements

    def _accumulated(self) -> List[Statement]:
        if self.name == "halves":
            return self._by_hand()
        trainer = self.random.choice(list(self.model.nets_of))
        of_it = [what for what, name in self.model.trained_by.items() if name == trainer]
        body: List[Statement] = []
        for _ in range(self.random.randint(1, 3)):
            one = self._pass(self.random.choice(of_it))
            body += [one, self._step(one.what)]
            body[-1] = Step(trainer, "ignore" if one.what in self.model.unreached and self.unused != "find" else "step")
        groups: List[Statement] = [Group(trainer, tuple(body))]
        if self.random.random() < 0.3:
            groups.append(Group(trainer, tuple(body[:2])))
        if self.random.random() < 0.5:
            return [*groups, Flush(trainer, bool(self.model.unreached) and self.unused == "ignore")]
        one = self._pass(self.random.choice(of_it))
        return [*groups, one, self._step(one.what)]

    def _replaced(self) -> List[Statement]:
        """Return a trainer that is replaced between the parts of an update."""
        if self.name in ("halves", "shapeless"):
            return self._by_hand()
        one = self._pass()
        trainer, ignore = self.model.trained_by[one.what], one.what in self.model.unreached and self.unused != "find"
        new = self.optimizer[0], tuple(self.optimizer[1].items())
        step = Step(trainer, "ignore" if ignore else "step")
        again = replace(self._pass(one.what), back="mgpu")
        return [Group(trainer, (one, step)), NewTrainer(trainer, new), again, step]

    def _epochs(self) -> List[Statement]:
        if not self.model.whole or self.name in ("halves", "branches"):
            return self._by_hand()
        what = self.random.choice(list(self.model.whole))
        single = self.name not in ("two_inputs",) and self.model.batch_axis == 0
        loaders = ["list", "ArrayLoader", "DataLoader"] if single else ["list"]
        loader = "NDArrayIter" if single and self.random.random() < 0.1 else self.random.choice(loaders)
        num = self.random.randint(1, 3 * self.num_devices)
        size = self.random.randint(1, max(1, min(num, self.num_devices + 2)))
        epochs, group, micro = self.random.choice([1, 1, 2]), self.random.choice([1, 2, 3]), self.random.choice([1, 1, 2])
        return [Fit(what, num, size, self._seed(), epochs, group, micro, loader)]

    def _parallel(self) -> List[Statement]:
        if self.name not in ("mlp", "conv", "tied", "deep", "embedding", "sparse", "layernorm") or self.is_local:
            return self._by_hand()
        return [Parallel("all", self._num(), self._seed())]

    def _wasserstein(self) -> List[Statement]:
        statements: List[Statement] = []
        for _ in range(self.random.randint(1, 3)):
            statements += [self._pass("critic"), Step("discriminator")]
            if self.random.random() < 0.7:
                statements.append(ClipWeights("discriminator", 0.4))
        return [*statements, self._pass("critic generator"), Step("generator")]

    def _change(self, setting: Setting) -> List[Statement]:
        """Return something that users do between two steps."""
        choice, trainer = self.random.choice, self.random.choice(list(self.model.nets_of))
        net, layer = self._net(), self.random.randint(0, 20)
        changes: List[Statement] = [SetData(net, self._seed(), choice([False, True]))]
        if self.model.whole and self.name != "heads":
            num = self._num()
            changes += [Look(choice(list(self.model.whole)), num, self._seed(), self.model.scores and choice([False, True]))] * 2
        if not setting.schedule:
            changes.append(Rate(choice([0.01, 0.03]), trainer))
        if not self.static:
            changes.append(Multiply(net, layer, choice([0.0, 0.5, 1.0]), choice([0.0, 1.0, 2.0])))
        if not self.static and not self.adds and self.name not in ("shapeless", "halves"):
            changes += [Freeze(net, layer), Freeze(net, layer, "write")]
        if not self.adds and self.name != "shapeless":
            optimizer = choice(_OPTIMIZERS)
            new = optimizer[0], tuple(optimizer[1][0].items())
            changes += [] if self.is_local or self.is_sharded or optimizer[0] == "sgld" else [NewTrainer(trainer, new)]
            changes += [Copied(net, teacher=False)]
        if self.model.hybrid:
            flags = choice(self.flags)
            changes.append(Hybridize(None if flags is None else tuple(flags.items())))
        if getattr(self, "has_teacher", False):
            changes += [Follow(net)] * 2 if self.name != "gan" else []
        if not self.adds and self.name not in ("shapeless", "batchnorm"):
            hows = ["states"] if self.name == "halves" else ["states", "checkpoint"]
            if setting.passed_as != "list" and self.optimizer[0] not in ("adamw",):
                hows.append("gluon")
            changes.append(Move(choice(hows), self.random.randint(1, 5)))
        one = choice(changes)
        return [*(Flush(name) for name in self.model.nets_of if isinstance(one, Move)), one]

    def _end(self) -> List[Statement]:
        """Return what a program ends with."""
        if self.name == "batchnorm":
            return [Look("all", 4, self._seed())]
        return []


def composed(seed: int) -> Program:
    """Return the program of a seed."""
    return Composer(seed).program()
