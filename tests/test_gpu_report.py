"""The report of a machine with GPUs: it is made on one without, says so, and names nobody."""

import sys

import gpu_measurements
import gpu_report
import pytest

# Without names


@pytest.mark.parametrize(
    "text, expected",
    [
        ("/home/kim/a.py and /Users/lee/b.py", "~/a.py and ~/b.py"),
        ("/root/a.py, /rooted/a.py", "~/a.py, /rooted/a.py"),
        ("kim@gpubox: kimchi, kim-1", "<user>@<host>: kimchi, kim-1"),
        ("in /opt/x/gluon/a.py, /opt/x/gluon2", "in <project>/a.py, /opt/x/gluon2"),
        ("GPU-0123abcd-0123-abcd-0123-0123456789ab", "<uuid of a GPU>"),
        ("cuBLAS 11.11.3.6", "cuBLAS 11.11.3.6"),
    ],
)
def test_names_are_taken_out(text, expected):
    hidden = [("/opt/x/gluon", "<project>"), ("gpubox", "<host>"), ("kim", "<user>")]
    assert gpu_report.scrub({"a": [text]}, hidden) == {"a": [expected]}


def test_keys_reach_neither_the_parts_nor_the_report(tmp_path, monkeypatch):
    """A part that prints its environment, as a traceback may, has none to print; what it has from elsewhere is taken out."""
    monkeypatch.setenv("NVIDIA_API_KEY", "nvapi-0123456789")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = gpu_report.run([sys.executable, "-c", "import os; print(dict(os.environ))"], tmp_path, 30)
    assert "nvapi" not in done.output and "NVIDIA_API_KEY" not in done.output
    assert "'OMP_NUM_THREADS': '1'" in done.output
    assert gpu_report.scrub("key: nvapi-0123456789, MIG-0123abcd-0123-abcd-0123-0123456789ab", gpu_report.secrets()) == (
        "key: <secret>, <uuid of a GPU>"
    )


def test_parts_that_go_wrong_are_reported(tmp_path):
    done = gpu_report.run([sys.executable, "-c", "print('said'); raise SystemExit('why')"], tmp_path, 240)
    assert done.facts() == {**done.facts(), "ended": "exit status 1", "output": "said\n", "errors": "why\n"}
    done = gpu_report.run([sys.executable, "-c", "import time; time.sleep(10_000)"], tmp_path, 0.5)
    assert done.facts()["ended"] == "took too long"


# Tests


RESULTS = """<testsuites><testsuite>
<testcase name="test_a[gpu]" time="1.234"/>
<testcase name="test_b[1-gpu]" time="0.5"><failure message="short">the whole traceback</failure></testcase>
<testcase name="test_c[gpu-2]" time="0"><skipped message="needs 2 GPUs that MXNet can run on; there is 1"/></testcase>
<testcase name="test_a[rehearsal]" time="0.1"/>
<testcase name="test_d[rehearsal]" time="0.1"><error message="short">of a fixture</error></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read(tmp_path):
    (tmp_path / "results.xml").write_text(RESULTS)
    assert gpu_report.read_cases(tmp_path / "results.xml") == [
        {"test": "test_a[gpu]", "outcome": "passed", "seconds": 1.23},
        {"test": "test_b[1-gpu]", "outcome": "failed", "seconds": 0.5, "why": "the whole traceback"},
        {"test": "test_c[gpu-2]", "outcome": "skipped", "seconds": 0.0, "why": "needs 2 GPUs that MXNet can run on; there is 1"},
        {"test": "test_a[rehearsal]", "outcome": "passed", "seconds": 0.1},
        {"test": "test_d[rehearsal]", "outcome": "failed", "seconds": 0.1, "why": "of a fixture"},
    ]
    assert gpu_report.read_cases(tmp_path / "none.xml") == []


# Measurements


def test_measurements_are_rehearsed_on_cpu_contexts():
    """What they find there is what CPUs do: Dropout follows the seed, and running statistics move in the backward pass."""
    found = gpu_measurements.main("cpu", 2)
    assert found["dropout"] == {"Gluon": True, "gluon_mgpu": True}
    assert [values[0] for values in found["batch_norm"].values()] == [1.0, 1.0]
    assert min(found["uploads"]["ring"], found["uploads"]["new"], found["large_sum"]["sum"], found["overlap"]["step"]) > 0


def test_a_measurement_that_fails_does_not_stop_the_others(monkeypatch):
    monkeypatch.setattr(gpu_measurements, "seconds", lambda *runs: 1 / 0)
    found = gpu_measurements.main("cpu", 1)
    assert found["uploads"] == {"error": "ZeroDivisionError: division by zero"} and found["dropout"]["gluon_mgpu"]
