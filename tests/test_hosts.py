"""Which machines there are: host files, Slurm's node lists, what ssh is told; and which process this one is."""

import pytest
from gluon_mgpu.distributed import LaunchError, Process, this_process
from gluon_mgpu.distributed.launcher.hosts import Host, expand_nodelist, parse_hosts, slurm_nodes
from gluon_mgpu.distributed.launcher.interfaces import address_of
from gluon_mgpu.distributed.launcher.plan import Plan
from gluon_mgpu.distributed.launcher.rendezvous import parse_rendezvous

from .conftest import assert_house_style

NODE = {
    "GLUON_MGPU_RANK": "5",
    "GLUON_MGPU_NUM_PROCESSES": "6",
    "GLUON_MGPU_LOCAL_RANK": "1",
    "GLUON_MGPU_LOCAL_PROCESSES": "2",
    "GLUON_MGPU_NODE_RANK": "2",
    "GLUON_MGPU_NUM_NODES": "3",
    "GLUON_MGPU_RESTART": "1",
}


def test_this_process(monkeypatch):
    for name in NODE:
        monkeypatch.delenv(name, raising=False)
    assert this_process() == Process(0, 1, 0, 1, 0, 1, 0)
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    assert this_process() == Process(5, 6, 1, 2, 2, 3, 1)
    assert this_process().variables() == NODE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "6"),
        ("RANK", "-1"),
        ("RANK", "\u0663"),
        ("RANK", ""),
        ("RANK", "1" * 5000),
        ("NUM_PROCESSES", "0"),
        ("NUM_PROCESSES", "two"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_PROCESSES", "7"),
        ("NODE_RANK", "3"),
        ("NUM_NODES", "7"),
        ("RESTART", "1.0"),
        ("RESTART", None),
    ],
)
def test_variables_that_cannot_be(name, value):
    environ = {**NODE, f"GLUON_MGPU_{name}": value}
    if value is None:
        del environ[f"GLUON_MGPU_{name}"]
    with pytest.raises(LaunchError) as raised:
        this_process(environ)
    assert_house_style(raised.value)
    assert f"GLUON_MGPU_{name}" in str(raised.value)
    with pytest.raises(LaunchError, match="this_process: got environ of type list") as raised:
        this_process(list(environ.items()))
    assert_house_style(raised.value)


def test_host_files():
    text = "# two\n  node1  slots=4\n\nme@node2 # two slots\n"
    assert parse_hosts(text, slots=2) == [Host("node1", 4), Host("me@node2", 2)]


@pytest.mark.parametrize(
    "text", ["", "# none", "node1 4", "node1 slots=0", "node1 slots=4 x", "node1\nnode1", "-oProxyCommand=x"]
)
def test_wrong_host_files(text):
    with pytest.raises(LaunchError) as raised:
        parse_hosts(text, slots=1)
    assert_house_style(raised.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1,3-4]-ib,x", ["n1-ib", "n3-ib", "n4-ib", "x"]),
        ("r[1-2]n[8-9]", ["r1n8", "r1n9", "r2n8", "r2n9"]),
    ],
)
def test_node_lists(text, names):
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[3-1]", "n[]", "n[1-99999999]", "a;rm", "n[1-9999]m[1-9999]"])
def test_wrong_node_lists(text):
    with pytest.raises(LaunchError) as raised:
        expand_nodelist(text)
    assert_house_style(raised.value)


STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "gpu[4-6]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_LOCALID": "0",
}


def test_slurm():
    assert slurm_nodes({}) is None
    assert slurm_nodes({**STEP, "SLURM_NNODES": "1", "SLURM_NODEID": "0"}) is None
    assert slurm_nodes(STEP) == (3, 2, ("gpu4", 29856))
    part = {**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[5-6]", "SLURM_NODEID": "1"}
    assert slurm_nodes(part) == (2, 1, ("gpu5", 29856))  # srun -N 2 in a job of 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "4(x3)"},
        {"SLURM_STEP_TASKS_PER_NODE": "1,2"},
        {"SLURM_LOCALID": "1"},
        {"SLURM_STEP_ID": None},  # the batch script itself, without srun
        {"SLURM_NODEID": "3"},
        {"SLURM_NODEID": ""},
        {"SLURM_JOB_NODELIST": ""},
    ],
)
def test_slurm_that_does_not_fit(wrong):
    environ = {name: value for name, value in {**STEP, **wrong}.items() if value is not None}
    with pytest.raises(LaunchError) as raised:
        slurm_nodes(environ)
    assert_house_style(raised.value)


def test_rendezvous():
    assert parse_rendezvous("node0:29400") == ("node0", 29400)
    for wrong in ["node0", ":1", "node0:", "node0:0", "node0:65536", "node0:http"]:
        with pytest.raises(LaunchError) as raised:
            parse_rendezvous(wrong)
        assert_house_style(raised.value)


def test_addresses():
    assert address_of("lo") == address_of("localhost") == address_of("127.0.0.1") == "127.0.0.1"
    with pytest.raises(LaunchError, match="lo"):
        address_of("no-such-interface.invalid")


def test_ranks_go_node_by_node():
    plan = Plan(2, (2, 1, 3), (1, 1, 1), ("10.0.0.1", 9000))
    places = [plan.process(node, local) for node, count in enumerate(plan.counts) for local in range(count)]
    assert [place.rank for place in places] == [0, 1, 2, 3, 4, 5]
    assert places[4] == Process(4, 6, 1, 3, 2, 3, 2)
    assert all(this_process(place.variables()) == place for place in places)


@pytest.mark.parametrize(
    "wrong",
    [
        {"restart": -1},
        {"restart": True},
        {"counts": [1, "2"]},
        {"counts": 3},
        {"servers": [1]},
        {"root": ["10.0.0.1"]},
        {"root": [5, 9000]},
        {"root": ["10.0.0.1", 1e9]},
    ],
)
def test_plans_of_others_are_looked_at(wrong):
    said = {"restart": 0, "counts": [1, 2], "servers": [1, 1], "root": ["10.0.0.1", 9000], "backend": "dist_sync"}
    assert Plan.from_json(said) == Plan(0, (1, 2), (1, 1), ("10.0.0.1", 9000))
    with pytest.raises(LaunchError):
        Plan.from_json({**said, **wrong})
