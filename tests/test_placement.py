"""Which machine this is, from the variables of srun and mpirun; and which process this one is."""

import pytest
from gluon_mgpu.distributed import LaunchError, Process, this_process
from gluon_mgpu.distributed.launcher.job import Job
from gluon_mgpu.distributed.launcher.network import address_of
from gluon_mgpu.distributed.launcher.placement import placement

from .conftest import assert_house_style

PLACE = {"RANK": "5", "NUM_PROCESSES": "6", "LOCAL_RANK": "1", "LOCAL_PROCESSES": "2", "NODE_RANK": "2", "NUM_NODES": "3"}
NODE = {f"GLUON_MGPU_{name}": value for name, value in {**PLACE, "RESTART": "1"}.items()}


def test_this_process(monkeypatch):
    for name in NODE:
        monkeypatch.delenv(name, raising=False)
    assert this_process() == Process(0, 1, 0, 1, 0, 1, 0)
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    assert this_process() == Process(5, 6, 1, 2, 2, 3, 1)
    assert this_process().variables() == NODE


WRONG = [("RANK", value) for value in ("6", "-1", "\u0663", "", "1" * 5000)]
WRONG += [("NUM_PROCESSES", "two"), ("LOCAL_RANK", "2"), ("NODE_RANK", "3"), ("RESTART", "1.0"), ("RESTART", None)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_variables_that_cannot_be(name, value):
    environ = {**NODE, f"GLUON_MGPU_{name}": value}
    if value is None:
        del environ[f"GLUON_MGPU_{name}"]
    with pytest.raises(LaunchError) as raised:
        this_process(environ)
    assert_house_style(raised.value)


@pytest.mark.parametrize(
    ("text", "first"),
    [("node7", "node7"), ("a,b", "a"), ("n[098-101]", "n098"), ("n[1,3-4]-ib,x", "n1-ib"), ("r[1-2]n[8-9].org", "r1n8.org")],
)
def test_node_lists(text, first):
    assert placement({**STEP, "SLURM_STEP_NODELIST": text})[2][0] == first


STEP = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_NNODES": "3", "SLURM_PROCID": "2"}
STEP.update({"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "gpu[4-6]"})
TWO = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "x,y", "SLURM_PROCID": "1"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, (1, 0, None)),
        ({"SLURM_NNODES": "1"}, (1, 0, None)),
        (STEP, (3, 2, ("gpu4", 24_800))),
        ({**STEP, "SLURM_STEP_ID": "1"}, (3, 2, ("gpu4", 24_850))),  # two steps at a time use other ports
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (1, 0, None)),
        ({**STEP, **TWO}, (2, 1, ("x", 24_800))),  # srun -N 2 in a job of three
        (MPI, (2, 1, None)),
        ({**STEP, **MPI}, (2, 1, None)),  # mpirun within a job of Slurm
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, (4, 0, None)),
        ({**STEP, "PMI_SIZE": "3", "PMI_RANK": "2"}, (3, 2, ("gpu4", 24_800))),  # srun --mpi=pmi2
    ],
)
def test_srun_and_mpirun_say_which_machine_this_is(environ, found):
    assert placement(environ) == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_STEP_NUM_TASKS": "6"},  # two launchers on each machine
        {"SLURM_STEP_NUM_TASKS": None},  # the batch script itself, without srun
        {"SLURM_PROCID": "3"},
        {"SLURM_PROCID": ""},
        *({"SLURM_STEP_NODELIST": text} for text in ("", "n[1-", "n[a-b]", "n[]", "a;rm")),
        {"OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_a_place_that_does_not_fit(wrong):
    environ = {name: value for name, value in {**STEP, **wrong}.items() if value is not None}
    with pytest.raises(LaunchError) as raised:
        placement(environ)
    assert_house_style(raised.value)


def test_addresses():
    assert address_of("lo") == address_of("localhost") == address_of("127.0.0.1") == "127.0.0.1"
    with pytest.raises(LaunchError, match="no-such-interface"):
        address_of("no-such-interface.invalid")


def test_ranks_go_machine_by_machine():
    job = Job(("prog",), 2, num_nodes=3, master=("10.0.0.1", 9000), restart=2)
    places = [job.process(node, local) for node in range(3) for local in range(2)]
    assert [place.rank for place in places] == [0, 1, 2, 3, 4, 5]
    assert places[5] == Process(5, 6, 1, 2, 2, 3, 2)
    assert all(this_process(place.variables()) == place for place in places)
