"""What Horovod's processes are told: their places, where they meet, and what stands there."""

import http.client
import socket
import subprocess
import threading

import pytest
from gluon_mgpu.distributed.launcher.horovod_rendezvous import RendezvousServer
from gluon_mgpu.distributed.launcher.plan import Machine, Plan
from gluon_mgpu.distributed.process import LaunchError, Process, this_process

PLACE = {"RANK": 1, "SIZE": 3, "LOCAL_RANK": 0, "LOCAL_SIZE": 2, "CROSS_RANK": 1, "CROSS_SIZE": 2}


@pytest.fixture
def meeting():
    server = RendezvousServer("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(meeting, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(*meeting.server_address, timeout=240)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_what_is_put_there_is_found(meeting):
    assert ask(meeting, "GET", "/global/0") == (404, b"")
    assert ask(meeting, "PUT", "/global/0", b"\x00address\xff") == (200, b"")
    assert ask(meeting, "PUT", "/local/0", b"") == (200, b"")
    assert ask(meeting, "DELETE", "/global/0") == (200, b"")
    assert ask(meeting, "GET", "/global/0") == (200, b"\x00address\xff")  # others may need it still
    assert ask(meeting, "GET", "/local/0") == (200, b"")
    assert ask(meeting, "GET", "/global/1") == (404, b"")


def test_an_entry_that_breaks_off_is_none(meeting):
    with socket.create_connection(meeting.server_address, timeout=240) as connection:
        connection.sendall(b"PUT /global/0 HTTP/1.0\r\nContent-Length: 10\r\n\r\nhalf")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100).startswith(b"HTTP/1.0 400")
    assert ask(meeting, "GET", "/global/0") == (404, b"")


def test_it_is_at_one_address_only(meeting):
    assert meeting.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", meeting.server_port), timeout=240)


def test_places(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "7")
    monkeypatch.setenv("DMLC_ROLE", "worker")
    plan = Plan(1, 2, 2, 0, ("127.0.0.1", 9000), "horovod")
    meeting, *workers = Machine(("prog",)).tasks(plan, 0)
    assert meeting.name == "rendezvous"
    assert meeting.command[-2:] == ("127.0.0.1", "9000")
    assert meeting.slot < 0
    assert "HOROVOD_RANK" not in meeting.environ
    workers += Machine(("prog",)).tasks(plan, 1)  # no meeting there
    found = [{name: task.environ[f"HOROVOD_{name}"] for name in (*PLACE, "HOSTNAME")} for task in workers]
    assert [[int(one[name]) for name in PLACE] for one in found] == [
        [0, 4, 0, 2, 0, 2],
        [1, 4, 1, 2, 0, 2],
        [2, 4, 0, 2, 1, 2],
        [3, 4, 1, 2, 1, 2],
    ]
    assert [one["HOSTNAME"] for one in found] == ["node0", "node0", "node1", "node1"]
    for task in workers:
        assert task.environ["HOROVOD_GLOO_IFACE"] == "lo"
        assert task.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert "DMLC_ROLE" not in task.environ
        assert this_process(task.environ).num_processes == 4
    (alone,) = Machine(("prog",)).tasks(Plan(0, 1, 1, 0, ("127.0.0.1", 1), "horovod"), 0)
    assert "HOROVOD_RANK" not in alone.environ


def test_a_meeting_that_cannot_be_held_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        meeting, *_ = Machine(("prog",)).tasks(Plan(0, 1, 2, 0, taken.getsockname(), "horovod"), 0)
        done = subprocess.run(meeting.command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "Address already in use" in done.stderr


def test_the_place_that_horovodrun_tells():
    said = {f"HOROVOD_{name}": str(value) for name, value in PLACE.items()}
    assert this_process(said) == Process(1, 3, 0, 2, 1, 2, 0)
    for name, value, told in (("LOCAL_SIZE", None, "nothing"), ("RANK", "x", "'x'"), ("RANK", "3", "at most 2")):
        wrong = {**said, f"HOROVOD_{name}": value}
        with pytest.raises(LaunchError, match=f"HOROVOD_{name}={told}|{told}"):
            this_process({key: text for key, text in wrong.items() if text is not None})
