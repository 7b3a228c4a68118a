"""What Horovod's processes are told: their places, and where they meet."""

from dataclasses import replace

import pytest
from gluon_mgpu.distributed.launcher.job import Job
from gluon_mgpu.distributed.launcher.tasks import tasks
from gluon_mgpu.distributed.process import LaunchError, Process, this_process

PLACE = {"RANK": 1, "SIZE": 3, "LOCAL_RANK": 0, "LOCAL_SIZE": 2, "CROSS_RANK": 1, "CROSS_SIZE": 2}


def test_places(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "7")
    monkeypatch.setenv("DMLC_ROLE", "worker")
    job = Job(("prog",), 2, num_nodes=2, master=("127.0.0.1", 9000), backend="horovod")
    *_, meeting, one, other = tasks(job, "127.0.0.1", ("127.0.0.1", 9000))
    assert meeting.name == "rendezvous"
    assert meeting.command[-2:] == ("127.0.0.1", "9000")
    assert meeting.slot < 0
    assert "HOROVOD_RANK" not in meeting.environ
    watch, *others = tasks(replace(job, node_rank=1), "127.0.0.1", ("127.0.0.1", 9000))
    assert watch.name == "machines"  # the rendezvous is on node 0
    workers = [one, other, *others]
    found = [{name: task.environ[f"HOROVOD_{name}"] for name in (*PLACE, "HOSTNAME")} for task in workers]
    places = [[0, 4, 0, 2, 0, 2], [1, 4, 1, 2, 0, 2], [2, 4, 0, 2, 1, 2], [3, 4, 1, 2, 1, 2]]
    assert [[int(one[name]) for name in PLACE] for one in found] == places
    assert [one["HOSTNAME"] for one in found] == ["node0", "node0", "node1", "node1"]
    for task in workers:
        assert task.environ["HOROVOD_GLOO_IFACE"] == "lo"
        assert task.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert "DMLC_ROLE" not in task.environ
        assert this_process(task.environ).num_processes == 4
    (alone,) = tasks(Job(("prog",), backend="horovod"), "127.0.0.1", ("127.0.0.1", 1))
    assert "HOROVOD_RANK" not in alone.environ


def test_the_place_that_horovodrun_tells():
    said = {f"HOROVOD_{name}": str(value) for name, value in PLACE.items()}
    assert this_process(said) == Process(1, 3, 0, 2, 1, 2, 0)
    for name, value, told in (("LOCAL_SIZE", None, "''"), ("RANK", "x", "'x'"), ("RANK", "3", "ranks below")):
        wrong = {**said, f"HOROVOD_{name}": value}
        with pytest.raises(LaunchError, match=f"HOROVOD_{name}={told}|{told}"):
            this_process({key: text for key, text in wrong.items() if text is not None})
