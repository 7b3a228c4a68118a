"""The comparisons of scripts/benchmarks: processes, rounds, ratios, and contenders that fail. No test reads a clock."""

import json
import os
import re
import stat
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import exposed
import gluon_mgpu as mgpu
import imports
import mxnet as mx
import numpy as np
import pytest
import report
import seq2seq
import seq2seq_with_mxnet
import workloads
from click.testing import CliRunner
from commands import main
from compare import Row
from gluon_mgpu.trainer.slab import BUCKET_BYTES
from measure import run_round
from sentences import read_batches

PROGRAM = Path(workloads.__file__).parent
ROOT = PROGRAM.parent.parent
CASE = workloads.quick(workloads.STEPS["mlp"])
STEADY = """
    say(versions={})
    for number, request in enumerate(requests):
        say(**({"found": {"whole_s": 1.0 + number, "dispatch_s": 2.0}} if "round" in request else {}))
"""


def bench(*arguments, exit_code=0):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture
def fake(tmp_path):
    """Make a Python that runs a given program instead of the worker. The program has `say` and `requests`."""
    return partial(make_fake, tmp_path)


def make_fake(folder, name, program):
    path = folder / name
    start = f"#!{sys.executable}\nimport json, os, signal, sys, time\nrequests = map(json.loads, sys.stdin)\n"
    say = "def say(**content):\n    print(json.dumps(content), flush=True)\n"
    path.write_text(start + say + textwrap.dedent(program))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.exhaustive
def test_a_comparison_from_the_command_to_its_files(fake, tmp_path):
    """Ours is real, on one device: each process imports MXNet."""
    options = ["--quick", "--contenders", "ours,gluon", "--num-devices", "1", "--python", f"gluon={fake('gluon', STEADY)}"]
    output = bench("step", *options, "--output", tmp_path)
    found = json.loads((tmp_path / "step.json").read_text())
    ours, gluon = found["rows"]
    assert [row["contender"] for row in (ours, gluon)] == ["ours", "gluon"] and found["rounds"] == 2
    assert set(ours["rounds"][0]) == {"dispatch_s", "split_s", "forward_s", "backward_s", "update_s", "whole_s"}
    assert all(value > 0 for one in ours["rounds"] for value in one.values())
    assert ours["versions"]["mxnet"] == "1.9.1" and ours["environment"]["OMP_NUM_THREADS"] == "1"
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0)) and found["command"][:2] == ["python", "scripts/benchmarks"]
    mine, theirs = ([one["whole_s"] for one in row["rounds"]] for row in (gluon, ours))
    assert gluon["medians"]["whole_s"] == pytest.approx({"median": np.median(mine), "min": min(mine), "max": max(mine)})
    assert gluon["ratios"]["whole_s"]["median"] == pytest.approx(np.median(np.divide(mine, theirs)))
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert output.splitlines()[-1].endswith("step.json")


@pytest.mark.parametrize("path", [*sorted((ROOT / "docs").glob("*.md")), PROGRAM / "RESULTS.md"], ids=lambda path: path.name)
def test_commands_on_pages_have_the_options(path):
    for words in re.findall(r"python scripts/benchmarks ([^`#]*)", path.read_text(encoding="utf-8")):
        name, *rest = words.split()
        if name == "--help":
            continue
        flags = {flag for parameter in main.commands[name].params for flag in parameter.opts + parameter.secondary_opts}
        assert {word for word in rest if word.startswith("--")} <= flags | {"--help"}


# How contenders are compared


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    """Not the ratio of the medians: a slow moment affects both values of a round."""
    ours = Row("ours", "g", CASE, rounds=[{"t_s": 1.0}, {"t_s": 10.0}, {"t_s": 2.0}])
    other = Row("gluon", "g", CASE, rounds=[{"t_s": 3.0}, {"t_s": 20.0}, {"t_s": 2.0}])
    assert report.ratio_to_ours(other, [ours, other], "t_s") == report.Spread(2.0, 1.0, 3.0)
    assert median([3.0, 20.0, 2.0]) / median([1.0, 10.0, 2.0]) == 1.5
    assert report.ratio_to_ours(other, [other], "t_s") is None


def test_imports_are_compared_within_each_round():
    found = {imports.MXNET: [2.0, 4.0, 2.0], "import gluon_mgpu, mxnet": [2.2, 4.0, 2.6]}
    assert [line[2] for line in imports.table(found)[2]] == ["1.000", "1.100"]


# A model of sums on several GPUs


@pytest.mark.parametrize(("cut", "waits", "expected"), [(None, False, 0.112), (10e6, False, 0.014), (10e6, True, 0.014)])
def test_an_embedding_is_copied_after_the_backward_pass(cut, waits, expected):
    """96 MB at 12 GB/s take 8 ms: seven copies to its owner and seven from there, one after the other, or an eighth each."""
    found = list(exposed.pieces([96e6], 8, 0.1, 8e6, cut))
    assert exposed.exposed_s(found, 8, 0.1, 12e9, waits=waits) == pytest.approx(expected)


@pytest.mark.parametrize(("waits", "expected"), [(False, 0.02), (True, 0.03)])
def test_sums_and_weights_are_copied_during_the_backward_pass_unless_a_loss_scale_waits(waits, expected):
    """Copies of 10 ms each in a pass of 20 ms: of a slab that is ready before it, and of one after it, on the same owner."""
    found = [exposed.Piece(1e8, 0.0, 0), exposed.Piece(1e8, 0.02, 0)]
    assert exposed.exposed_s(found, 2, 0.02, 1e10, waits=waits) == pytest.approx(expected)


def test_the_model_divides_as_the_trainer_does(monkeypatch):
    monkeypatch.setattr("gluon_mgpu.trainer.trainer.CUT_BYTES", 2 * 2**20)
    net = mx.gluon.nn.HybridSequential()
    for inputs, outputs in ((64, 16384), (256, 512), (512, 512), (512, 1024), (1024, 512), (512, 16)):
        net.add(mx.gluon.nn.Dense(outputs, in_units=inputs, use_bias=False))
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    slabs = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}).steps.layout.slabs
    sizes = [4 * int(np.prod(param.shape)) for param in net.collect_params().values()]
    found = exposed.pieces(sizes, 2, 1.0, BUCKET_BYTES, 2 * 2**20)
    assert [(4 * (slab.end - slab.begin), slab.owner) for slab in slabs] == [(piece.size, piece.owner) for piece in found]


# Translators


@pytest.fixture(scope="module", params=seq2seq.SIZES)
def text(request, tmp_path_factory):
    return seq2seq.make_text(request.param, tmp_path_factory.mktemp("text"), quick=True)


def test_ours_and_gluon_s_loop_train_alike(text):
    """The same network, batches and updates: three passes over the data, on two contexts."""
    case = replace(text.case, num_devices=2)
    found = []
    for contender in (seq2seq_with_mxnet.Ours, seq2seq_with_mxnet.Gluon):
        trains = contender(case)
        run_round(trains, case)
        found.append([param.data(trains.ctx[0]).asnumpy() for param in trains.net.collect_params().values()])
    for ours, gluon in zip(*found):
        np.testing.assert_allclose(ours, gluon, atol=2e-4)  # sums of different order, under Adam
    assert len(read_batches(case.corpus)) >= 1


# Scaling
