"""Contract: where modes cross, several devices train what one device trains with plain Gluon, or docs/limitations.md refuses it.

`GLUON_MGPU_CROSSINGS` sets the number of random programs, `GLUON_MGPU_CROSSINGS_S` the seconds after which none starts, and
`GLUON_MGPU_TEST_SEED` which ones they are. A finding is shown as a `Program`, made as simple as Hypothesis can.
"""

import os
import runpy
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .conftest import SEED
from .crossed import ROOT, finding, findings_of_jobs, modes_of, run, unequal
from .crossings import OPTIMIZERS, Program

pytestmark = [pytest.mark.timeout(3600), pytest.mark.mxnet1("Pipeline")]
NETS = ["plain", "skip", "residual", "tied", "conv", "norm", "norm_first", "norms", "unused"]
HOWS = ["train_batch", "compiled", "fit", "compiled fit", "plain", "hand", "reduce"]

STEP, HAND = ("step", "train_batch", 6, 1), ("step", "hand", 6, 1)
COMPILED, ONE, FEW = ("step", "compiled", 6, 1), ("step", "train_batch", 1, 1), ("step", "train_batch", 3, 1)
THAWED = ("freeze", -1), ("other", 6), ("thaw", -1), ("other", 6)
WENT_WRONG = {
    "a skip over stages": Program(net="skip", hybridize="dynamic", stages=4, statements=(STEP, STEP)),
    "a skip in own stages": Program(net="skip", hybridize="dynamic", stages=3, own_stages=True, statements=(STEP, STEP)),
    "thawed parameters": Program(num_devices=3, statements=(STEP, *THAWED, ONE)),
    "thawed parameters by hand": Program(num_devices=3, statements=(HAND, *THAWED, ("step", "hand", 1, 1))),
    "thawed parameters of one device": Program(statements=(STEP, *THAWED[:3], ("step", "compiled fit", 6, 1))),
    "statistics that do not move": Program(net="norm_first", stages=2, micro_batches=2, statements=(STEP,)),
    "statistics of a large mean": Program(net="norms", stages=1, micro_batches=2, offset=100.0, statements=(STEP,)),
    "synchronised later": Program(net="norm", num_devices=2, statements=(COMPILED, ("norm", "sync"), COMPILED)),
    "unused": Program(net="unused", virtual_shards=2, statements=(("group", "train_batch", [4, 4], "flush"),)),
    "unused, allowed": Program(
        net="unused", virtual_shards=2, ignore_stale=True, statements=(("group", "train_batch", [4, 4], "flush"),)
    ),
    "sums of a user": Program(num_devices=2, virtual_shards=2, statements=(("add", True), STEP, STEP)),
    "frozen between averages": Program(num_devices=2, local_steps=2, statements=(STEP, ("freeze", 0), STEP, STEP)),
    "a pass without a step": Program(net="norm", num_devices=2, statements=(("dropped", 3), ONE, FEW, ("look", 4))),
    "a pipeline by hand": Program(net="norm", stages=2, replicas=2, statements=(HAND, ("step", "hand", 7, 1), ("look", 4))),
    "other arrays of a static graph": Program(hybridize="static", statements=(STEP, STEP, *THAWED[::2], STEP)),
    "other arrays by hand": Program(hybridize="static", statements=(HAND, HAND, *THAWED[::2], HAND)),
}

BY_ONE, BROKEN = ("step", "hand", 1, 1), ("broken", "train_batch", 6)
STORIES = {
    "frozen and thawed between groups": Program(
        num_devices=3,
        statements=(("freeze", 0), ("group", "hand", [4, 5], "flush"), ("thaw", 0), ("group", "hand", [3, 2], "flush")),
    ),
    "shapes of the first micro-batch": Program(
        num_devices=3,
        deferred=True,
        statements=(("group", "train_batch", [5], "flush"), ("group", "train_batch", [1, 1], "flush")),
    ),
    "a user's sums by hand": Program(
        num_devices=3, adds=True, statements=(HAND, BY_ONE, ("zero",), ("step", "reduce", 4, 1), HAND)
    ),
    "layers frozen in turns": Program(
        num_devices=2,
        optimizer="adam",
        hybridize="dynamic",
        statements=(("freeze", 0), STEP, STEP, ("thaw", 0), ("freeze", 1), STEP, STEP, ("thaw", 1), STEP),
    ),
    "statistics of replicas": Program(net="norm", stages=2, replicas=2, statements=(("step", "fit", 9, 1), STEP, ("look", 4))),
    "a broken pass by hand": Program(net="norm", stages=2, replicas=2, statements=(("dropped", 1), ("broken", "hand", 2))),
    "a pipeline synchronised later": Program(net="norm", stages=2, micro_batches=2, statements=(STEP, ("norm", "sync"), STEP)),
    "a batch of an update alone": Program(virtual_shards=2, statements=(("group", "train_batch", [4, 4], "step"), STEP)),
    "virtual shards of an update that is clipped": Program(virtual_shards=4, clip_norm=0.05, statements=(STEP, FEW, STEP)),
    "an exception between virtual shards": Program(num_devices=2, virtual_shards=4, statements=(STEP, BROKEN, STEP)),
    "an exception between micro-batches": Program(stages=2, replicas=2, micro_batches=2, statements=(STEP, BROKEN, STEP)),
    "graphs of parts of the network": Program(
        num_devices=2, virtual_shards=4, ignore_stale=True, statements=(("parts", "compiled", [6, 6, 6, 6]),)
    ),
    "compiled and recorded in turns": Program(
        num_devices=2, hybridize="static", statements=(COMPILED, STEP, COMPILED, ONE, COMPILED)
    ),
}
RENEWED = {
    "a new trainer of virtual shards": Program(num_devices=2, virtual_shards=8, statements=(STEP, ("renew",), FEW, ONE)),
    "a new trainer of replicas": Program(
        stages=2, replicas=2, micro_batches=2, hybridize="static", statements=(STEP, ("renew",), ONE, FEW)
    ),
    "a new trainer of local steps": Program(num_devices=3, local_steps=2, statements=(STEP, ("renew",), STEP)),
}
JOBS = {  # of two processes
    "a process without examples": (("other", 6), BY_ONE, ("other", 6), HAND, ("other", 6), ONE),
    "shapes of the first batch": (ONE, STEP),
    "shapes of the first batch by hand": (HAND,),
    "shapes of the first sum": (("step", "reduce", 6, 1),),
    "shapes of the first group": (("group", "hand", [6], "flush"),),
    "shapes of another network's pass": (("other", 6), STEP),
}
VARIANCES = ("step", "hand", 3, 1), ("step", "fit", 9, 1)  # of one example each are equal, the means are not


@st.composite
def programs(draw, num_processes=1, net=None, mode=None):
    """Programs of modes that may refuse each other: rarely, so that most are compared."""

    def rarely(values, usual, one_in=5):
        return draw(st.sampled_from(values)) if draw(st.integers(1, one_in)) == one_in else usual

    several = num_processes > 1
    mode = mode or draw(st.sampled_from(["data", "data", "pipeline", "pipeline", "virtual", "data" if several else "local"]))
    fields = {"num_processes": num_processes, "arrays": draw(st.sampled_from(["nd", "np"]))}
    fields["net"] = draw(st.sampled_from(NETS[: -1 if several or mode == "pipeline" else None])) if net is None else net
    fields["deferred"] = fields["net"] != "unused" and draw(st.booleans())
    fields["hybridize"] = draw(st.sampled_from([None, "dynamic", "static"]))
    fields["optimizer"] = draw(st.sampled_from(list(OPTIMIZERS)[: 2 if mode == "local" else -1]))
    fields["optimizer"] = rarely(["nadam"], fields["optimizer"], 20)
    fields["offset"] = rarely([100.0], 0.0) if fields["net"] in ("norm_first", "norms") else 0.0
    fields["clip_norm"], fields["clip_value"] = rarely([0.05], None), rarely([0.01], None)
    parts = fields["net"] in ("plain", "residual", "tied", "norm", "norms") and mode in ("data", "virtual") and not several
    fields["ignore_stale"] = draw(st.booleans()) if parts or fields["net"] == "unused" else False
    fields["adds"] = rarely([True], False, 20 if mode == "virtual" else 6)
    fields["num_devices"] = draw(st.sampled_from([1, 2] if several else [1, 2, 3, 4]))
    hows = HOWS
    if mode == "pipeline":
        fields["stages"] = draw(st.integers(1, {"skip": 4, "plain": 3, "residual": 3}.get(fields["net"], 2)))
        fields["replicas"] = draw(st.sampled_from([1, 1, 2]))
        fields["micro_batches"] = draw(st.integers(1, 4))
        fields["schedule"] = draw(st.sampled_from(["1f1b", "gpipe"]))
        fields["recompute"] = draw(st.booleans())
        fields["own_stages"] = fields["net"] in ("plain", "residual", "skip", "norm") and draw(st.booleans())
        hows = rarely([HOWS], ["train_batch", "fit", "plain", "hand", "reduce"], 20)
    elif mode == "virtual":
        fields["virtual_shards"] = fields["num_devices"] * num_processes * draw(st.sampled_from([1, 2, 3]))
        hows = rarely([HOWS], HOWS[:-3], 10)
    elif mode == "local":
        fields["local_steps"] = draw(st.integers(1, 3))
        fields["net"] = draw(st.sampled_from(["plain", "skip", "conv", "tied"]))
        hows = rarely([HOWS], HOWS[:-1], 10)
    fields["shard_optimizer"] = rarely([False], True, 2)
    normalizes = "norm" in fields["net"]
    if normalizes:
        fields["bn"] = rarely(["sync"], "local", 4) if mode == "data" else rarely(["sync"], "local", 20)
    elif mode in ("data", "virtual") and net is None:
        fields["weights"] = rarely([(3, 1, 2, 0.5)[: fields["num_devices"]]], (), 4 if mode == "data" else 20)
    fields["splits"] = draw(st.sampled_from(["late", "early", "twice"]))
    parts = draw(st.lists(statements(fields, hows, mode), min_size=1, max_size=6))
    if several and fields["deferred"]:  # until then each process has its own weights
        parts.insert(0, (("step", draw(st.sampled_from(["train_batch", "fit", "hand"])), draw(st.integers(1, 9)), 1),))
    fields["statements"] = tuple(one for part in parts for one in part)
    return Program(**fields)


def statements(fields, hows, mode):
    """Return the strategy of one or some statements of a program with these modes."""
    sizes, layers = st.integers(1, 9), st.integers(-1, 3)

    def one(verb, *values):
        return st.tuples(st.just(verb), *values)

    counts = [fields["num_devices"]]
    if mode == "virtual" and not fields.get("weights"):
        each = fields["virtual_shards"] // fields["num_processes"]
        counts = [number for number in (1, 2, 3, 4) if each % number == 0]
    step = one("step", st.sampled_from(hows), sizes, st.sampled_from([1, 1, 2, 3]))
    in_groups = st.sampled_from([how for how in hows if how != "reduce"])
    group = one("group", in_groups, st.lists(sizes, min_size=1, max_size=3), st.sampled_from(["step", "flush"]))
    kinds = [step, step, step, group, one("freeze", layers), one("thaw", layers), one("look", sizes)]
    kinds += [one("rate", st.sampled_from([0.02, 0.2]))]
    kinds += [one("renew")] * (not fields["adds"]) + [one("reload", st.sampled_from(counts))] * 3
    kinds += [one("multiply", layers, st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.sampled_from([0.0, 1.0, 3.0]))] * 3
    if fields["ignore_stale"] and fields["net"] != "unused":
        hand = [how for how in hows if how not in ("reduce", "fit", "compiled fit")]
        kinds += [one("parts", st.sampled_from(hand), st.lists(sizes, min_size=2, max_size=4))] * 3
    kinds = [st.tuples(kind) for kind in kinds]
    if mode != "local" and fields["adds"] or mode == "virtual":
        kinds += [st.tuples(one("add", st.booleans())), st.tuples(one("zero"))]
    elif mode != "local":
        other = one("other", sizes, st.sampled_from(["hand", "hand", "compiled"] if mode == "data" else ["hand"]))
        kinds += [st.tuples(other), st.tuples(one("dropped", sizes))]
        kinds += [st.tuples(one("freeze", st.just(-1)), other, one("thaw", st.just(-1)), other, step)]
        kinds += [st.tuples(one("add", st.just(True)), step, step, one("zero"), step, one("add", st.just(False)))]
    is_pure = mode != "pipeline" or not fields["adds"]  # micro-batches add to the user's sums
    if is_pure and fields["num_processes"] == 1:  # an exception in one process ends a job
        hows = ["train_batch"] if mode == "virtual" else ["train_batch", "hand"]
        kinds += [st.tuples(one("broken", st.sampled_from(hows), sizes))]
    if "norm" in fields["net"] and mode == "data":
        kinds += [st.tuples(one("norm", st.sampled_from(["sync", "local"])))]
    return st.one_of(kinds)


def limits(config, share=1):
    """Return how many programs to try, a share of those of the module, and the time after which none starts."""
    number = int(os.environ.get("GLUON_MGPU_CROSSINGS", 1500 if config.getoption("exhaustive") else 40)) // share
    return number, time.monotonic() + float(os.environ.get("GLUON_MGPU_CROSSINGS_S", 3000))


def options(number, **more):
    """Return Hypothesis' settings for so many programs; the seed alone decides which."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=number, deadline=None, database=None, suppress_health_check=checks, **more)


@pytest.mark.parametrize(
    "program", [*WENT_WRONG.values(), *STORIES.values(), *RENEWED.values()], ids=[*WENT_WRONG, *STORIES, *RENEWED]
)
def test_chosen_programs(program):
    assert finding(program) == ""


def test_programs_train_what_one_device_trains(request):
    number, end = limits(request.config)

    @hypothesis.seed(SEED)
    @options(number)
    @given(programs())
    def tried(program):
        if time.monotonic() < end:
            found = finding(program)
            assert not found, f"{found}\n{program}"

    tried()


def test_two_threads_train_two_networks(request):
    """At once, each what it trains alone."""
    number, end = limits(request.config, 4)

    @hypothesis.seed(SEED)
    @options(number)
    @given(programs(), programs())
    def tried(one, other):
        pair = [replace(program, arrays="nd") for program in (one, other)]
        if time.monotonic() < end:
            with ThreadPoolExecutor(2) as pool:
                results = list(pool.map(run, pair))
            for program, result in zip(pair, results):
                if result[2] is not None and result[2].kind == "SystemError":  # CPython's, see mxnet_internals/living.py
                    continue
                found = finding(program, result)
                assert not found, f"{found}\n{program}\nbeside {pair}"

    tried()


def test_dropout_draws_the_same_with_virtual_shards(request):
    """Several devices against one: Dropout has no other oracle."""
    number, end = limits(request.config, 5)

    @hypothesis.seed(SEED)
    @options(number)
    @given(programs(net="dropout", mode="virtual"))
    def tried(program):
        if time.monotonic() < end and not {"grad_req='add'", "a loop by hand"} & modes_of(program):
            found = unequal(program, replace(program, num_devices=1))
            assert not found, f"{found}\n{program}"

    tried()


def test_programs_of_two_processes(request, tmp_path):
    """One job runs many; Hypothesis only draws them."""
    number, end = limits(request.config, 4)
    drawn = [Program(num_processes=2, deferred=name.startswith("shapes"), statements=one) for name, one in JOBS.items()]
    drawn.append(Program(num_processes=2, deferred=True, virtual_shards=4, statements=(ONE, STEP)))
    drawn.append(Program(num_processes=2, virtual_shards=4, statements=(STEP, ("freeze", 0), STEP, ("thaw", 0), STEP)))
    drawn.append(Program(net="norm", num_devices=2, num_processes=2, statements=VARIANCES))
    drawn.append(Program(num_processes=2, stages=2, micro_batches=3, clip_norm=0.05, statements=(STEP, FEW, ONE, STEP)))

    @hypothesis.seed(SEED)
    @options(number, phases=[Phase.generate])
    @given(programs(num_processes=2))
    def draw(program):
        drawn.append(program)

    draw()
    found = [f"{text}\n{program}" for program, text in findings_of_jobs(drawn, tmp_path, end) if text]
    assert not found, "\n\n".join(found)


def test_the_page_lists_what_the_checks_refuse():
    module = runpy.run_path(str(ROOT / "scripts" / "limitations.py"))
    assert module["page"]() == module["PAGE"].read_text(encoding="utf-8")
