"""Ctrl-C and SIGTERM: which step processes agree on, when a second signal counts, and what is saved."""

import multiprocessing
import os
import signal
import time
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.distributed.launcher.supervisor import Signals
from gluon_mgpu.loop.stop_signals import CaughtSignal, Requeue, StopVote, Terminated, catch_signals
from gluon_mgpu.mxnet_internals.parameters import structural_params

from .test_fit import LOSS, Recorder, batches_of, make_net, make_trainer, three_clouds, train
from .test_launch import mark

__all__ = ["mark"]  # a fixture


class Ranks:
    """Processes in lockstep: each votes, and all receive the votes of all."""

    def __init__(self, steps_s):
        self.steps_s = steps_s
        self.num_asked = 0

    def all_gather(self, numbers):
        self.num_asked += 1
        return np.float32([[numbers[0], step_s] for step_s in self.steps_s])


@pytest.mark.parametrize(
    ("steps_s", "asked_after"),
    [
        ([0.001, 0.002], [1, 3, 7, 15, 31, 47, 63]),  # fast: twice as many steps each time, up to 16
        ([0.001, 1.0], [1, 2, 3, 4, 5]),  # the slowest process decides
        ([0.1, 0.125], [1, 3, 7, 11, 15]),  # 4 steps are half a second
    ],
)
def test_processes_ask_each_other_about_every_half_second(become, steps_s, asked_after):
    ranks = Ranks(steps_s)
    become(ranks)
    vote, found = StopVote(), []
    for step in range(1, asked_after[-1] + 1):
        before = ranks.num_asked
        assert vote.after_step(0) == 0
        found += [step] * (ranks.num_asked - before)
    assert found == asked_after


def test_processes_do_not_ask_in_the_middle_of_a_group(become):
    """Asked after steps that are a multiple of 16 only, groups of 7 would stop after 112 steps."""
    become(Ranks([0.001, 0.001]))
    vote = StopVote()
    stopped = [step for step in range(1, 57) if vote.after_step(signal.SIGTERM, may_stop=step % 7 == 0)]
    assert stopped == [7, 14, 21, 35, 56]  # where the interval is at most 2, 4, 8, 16 steps


@pytest.fixture
def defaults():
    """Python's own signal handlers."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def sending(items, at, *signums):
    for number, item in enumerate(items, 1):
        if number == at:
            for signum in signums:
                signal.raise_signal(signum)
        yield item


@pytest.mark.parametrize(("signum", "end", "code"), [(signal.SIGTERM, Terminated, 143), (signal.SIGUSR1, Requeue, 85)])
def test_sigterm_and_sigusr1_save_and_end_with_their_code(defaults, devices, tmp_path, signum, end, code):
    """It ended the process in the middle of a step, and nothing was saved. timeout(1) sends it twice."""
    data = batches_of(*three_clouds())
    net, by_hand, recorder = make_net(devices), make_net(devices), Recorder()
    saves = mgpu.Checkpoint(tmp_path, monitor=None)
    with pytest.raises(SystemExit, match="^fit: stopped in epoch 1 after step 3$") as raised:
        train(devices, sending(data, 3, signum, signum), net=net, callbacks=[saves, recorder])
    assert type(raised.value) is end and raised.value.code == code
    assert recorder.calls[-1] == ("fit ends", 1, 0)
    assert recorder.state.history.stopped == "interrupted"
    assert signal.getsignal(signum) is signal.SIG_DFL
    trainer = make_trainer(by_hand)
    for pair in data[:3]:
        mgpu.train_batch(by_hand, LOSS, trainer, *pair)
    loaded = make_net(devices)
    assert mgpu.load_checkpoint(loaded, tmp_path / "last", make_trainer(loaded))["epoch"] == 1
    for name, param in structural_params(loaded).items():
        expected = structural_params(by_hand)[name].data(devices[0]).asnumpy()
        assert (param.data(devices[0]).asnumpy() == expected).all()


@pytest.mark.parametrize(
    ("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGUSR1, SystemExit)]
)
def test_a_signal_that_comes_when_all_is_done_still_ends_the_program(defaults, signum, error):
    """While the last callbacks save, it was noted and forgotten."""

    class Late(Recorder):
        def on_fit_end(self, state):
            super().on_fit_end(state)
            signal.raise_signal(signum)

    recorder = Late()
    with pytest.raises(error, match="fit: stopped at its end"):
        train([mx.cpu()], callbacks=[recorder])
    assert recorder.state.history.stopped == ""


@pytest.fixture
def killed(monkeypatch):
    """The signals by which this process would have ended itself, and their handlers."""
    found = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: found.append((signum, signal.getsignal(signum))))
    return found


def test_a_second_sigterm_ends_at_once(defaults, clock, killed):
    caught = CaughtSignal()
    with catch_signals(caught):
        caught.handle(signal.SIGTERM, None)
        clock[0] += 0.4
        caught.handle(signal.SIGTERM, None)
        assert killed == []
        clock[0] += 0.2
        caught.handle(signal.SIGTERM, None)
        assert killed == [(signal.SIGTERM, signal.SIG_DFL)]
        caught.signum = 0


def exit_code(function):
    """That of a forked process that runs a function."""
    child = multiprocessing.get_context("fork").Process(target=function)
    child.start()
    child.join(60)
    return child.exitcode


def test_a_fork_ends_at_once(defaults):
    """A DataLoader ends its workers by SIGTERM; forked within `fit`, they have its handler."""
    with catch_signals(CaughtSignal()):
        assert exit_code(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
        assert exit_code(lambda: signal.raise_signal(signal.SIGINT)) == 0  # the parent stops for it


def test_the_time_limit_after_sigusr1_leaves_time_to_save(defaults, clock, killed):
    """Slurm sends SIGTERM at the time limit, two minutes after --signal=USR1@120: a large checkpoint may still be written."""
    caught = CaughtSignal()
    with catch_signals(caught), Signals() as launcher:
        for signum, wait_s in [(signal.SIGUSR1, 1.0), (signal.SIGUSR1, 120.0), (signal.SIGTERM, 0.2), (signal.SIGTERM, 1.0)]:
            caught.handle(signum, None)
            signal.raise_signal(signum)  # to the launcher
            clock[0] += wait_s
        assert (caught.signum, killed) == (signal.SIGUSR1, [])
        assert (launcher.first, launcher.take()) == (signal.SIGUSR1, [signal.SIGUSR1, signal.SIGTERM])
        signal.raise_signal(signal.SIGTERM)
        caught.handle(signal.SIGTERM, None)
        assert ([signum for signum, _ in killed], launcher.take()) == ([signal.SIGTERM], [signal.SIGKILL])
        caught.signum = 0


def test_a_launcher_that_has_ended_ends_nothing_later(monkeypatch):
    """After a second signal, a launcher whose output nobody reads is ended; not the process that has run it to its end."""
    monkeypatch.setattr("gluon_mgpu.distributed.launcher.supervisor._LATE_S", 0.2)

    def interrupt(late_s=0.0, after_s=0.0):
        with Signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            time.sleep(late_s)
        time.sleep(after_s)

    assert exit_code(partial(interrupt, after_s=0.5)) == 0
    assert exit_code(partial(interrupt, late_s=60.0)) == 130
