"""One process of a job that is measured: adds up arrays with the others, or trains with them. Started by `scaling_job`.

It is run as a file, by any Python, as `worker` is: torch's need not have the package installed.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any, Dict, Iterable, List

ADDRESS, MEETING = "requests", "meeting"  # files in the folder of the job: a socket, and where torch's processes meet
_TIMEOUT_S = 60.0


class StoreSums:
    """Sums by `Group.all_reduce`, as the Trainer makes them: by MXNet's store or by Horovod, as the job was started."""

    def __init__(self, case: Any, _rank: int, _folder: str) -> None:
        self._mx = importlib.import_module("mxnet")
        processes = importlib.import_module("gluon_mgpu.distributed")
        self._group = processes.group() or processes.Group(processes.this_process())
        self._array = self._mx.nd.ones((case.total_size,))
        self._sum = self._group.all_reduce([self._array])
        self.add()
        _check(self._array.asnumpy(), case.num_devices)
        self._array[:] = 0  # which stays what it is, however often it is added up

    def wait(self) -> None:
        self._group.barrier()

    def add(self) -> None:
        self._sum.run(0)
        self._array.wait_to_read()


class GlooSums:
    """Sums by `torch.distributed.all_reduce` with gloo, on CPU tensors."""

    def __init__(self, case: Any, rank: int, folder: str) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._distributed = distributed = importlib.import_module("torch.distributed")
        if not distributed.is_initialized():
            meeting = f"file://{os.path.join(folder, MEETING)}"
            distributed.init_process_group("gloo", meeting, timedelta(seconds=_TIMEOUT_S), case.num_devices, rank)
        self._tensor = torch.ones(case.total_size)
        self.add()
        _check(self._tensor.numpy(), case.num_devices)
        self._tensor.zero_()

    def wait(self) -> None:
        self._distributed.barrier()

    def add(self) -> None:
        self._distributed.all_reduce(self._tensor)


def sum_round(contender: Any, case: Any) -> Dict[str, float]:
    """Return the median seconds of a sum, each waited for before the next."""
    contender.wait()
    contender.add()
    times = []
    for _ in range(case.repeats):
        started = time.perf_counter()
        contender.add()
        times.append(time.perf_counter() - started)
    return {"sum_s": median(times)}


def make(contender: str, case: Any, rank: int, folder: str) -> Any:
    """Return what a case is measured with; its `num_devices` are processes here."""
    is_torch = contender.startswith("torch")
    if case.workload == "sum":
        return (GlooSums if is_torch else StoreSums)(case, rank, folder)
    if not is_torch:
        return importlib.import_module("gluon_mgpu.benchmark.with_mxnet").Ours(replace(case, num_devices=1))
    module = importlib.import_module("gluon_mgpu.benchmark.with_torch")
    return module._Rank(case, rank, os.path.join(folder, MEETING)) if case.num_devices > 1 else module.Eager(case)


def serve(contender: str, rank: int, folder: str, requests: Iterable[bytes]) -> Iterable[Dict[str, Any]]:
    """Yield the answer to each request, as `worker.serve` does; the first one, unasked, says who this is."""
    worker = importlib.import_module("gluon_mgpu.benchmark.worker")
    try:
        yield {"rank": rank, "versions": {"python": sys.version.split()[0], **_versions(contender)}}
        case_type = importlib.import_module("gluon_mgpu.benchmark.case").Case
        run_round = importlib.import_module("gluon_mgpu.benchmark.measure").run_round
        ready: Dict[str, Any] = {}
        for line in requests:
            request = json.loads(line)
            if "setup" in request:
                case = case_type(**request["case"])
                ready[request["setup"]] = make(contender, case, rank, folder), case
                yield {}
            else:
                made, case = ready[request["round"]]
                yield {"found": (sum_round if case.workload == "sum" else run_round)(made, case)}
    except Exception as error:
        yield {"failed": worker._why(error)}


def main(arguments: List[str]) -> None:
    """Serve a contender, the first argument, by way of the socket in a folder, the second."""
    contender, folder = arguments
    worker = importlib.import_module("worker")  # it lies beside this file
    worker._find_package(whole=not contender.startswith("torch"))
    rank = int(os.environ["GLUON_MGPU_RANK"])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(folder, ADDRESS))
        with connection.makefile("rb") as requests:
            for answer in serve(contender, rank, folder, requests):
                connection.sendall(json.dumps(answer).encode() + b"\n")


def _check(sums: Any, num_processes: int) -> None:
    if float(sums.min()) != num_processes or float(sums.max()) != num_processes:
        raise RuntimeError(f"a sum of {num_processes} ones came to {float(sums.min()):g} to {float(sums.max()):g}")


def _versions(contender: str) -> Dict[str, str]:
    if contender.startswith("torch"):
        return dict(importlib.import_module("gluon_mgpu.benchmark.with_torch").Eager.versions())
    found = dict(importlib.import_module("gluon_mgpu.benchmark.with_mxnet").Ours.versions())
    if contender == "horovod":
        found["horovod"] = importlib.import_module("horovod").__version__
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
