"""One process of a measured job: sums arrays with the others, or trains with them. Started by `scaling_job`.

Any Python can run this file, as it can run `worker`: the one of PyTorch need not have the package installed.
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

import worker

ADDRESS, RENDEZVOUS = "requests", "rendezvous"  # files in the folder of the job: a socket, and PyTorch's file:// store
_TIMEOUT_S = 60.0


class StoreSums:
    """Sums by `Group.all_reduce`, as the Trainer calls it: through MXNet's store or Horovod, whichever the job uses."""

    def __init__(self, case: Any, _rank: int, _folder: str) -> None:
        self._mx = importlib.import_module("mxnet")
        processes = importlib.import_module("gluon_mgpu.distributed")
        self._group = processes.group() or processes.Group(processes.this_process())
        self._array = self._mx.nd.ones((case.total_size,))
        self._sum = self._group.all_reduce([self._array])
        self.add()
        _check(self._array.asnumpy(), case.num_devices)
        self._array[:] = 0  # the sum of zeros stays zero in every repeat

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
            store = f"file://{os.path.join(folder, RENDEZVOUS)}"
            distributed.init_process_group("gloo", store, timedelta(seconds=_TIMEOUT_S), case.num_devices, rank)
        self._tensor = torch.ones(case.total_size)
        self.add()
        _check(self._tensor.numpy(), case.num_devices)
        self._tensor.zero_()

    def wait(self) -> None:
        self._distributed.barrier()

    def add(self) -> None:
        self._distributed.all_reduce(self._tensor)


def sum_round(contender: Any, case: Any) -> Dict[str, float]:
    """Return the median seconds of a sum; each sum ends before the next one begins."""
    contender.wait()
    contender.add()
    times = []
    for _ in range(case.repeats):
        started = time.perf_counter()
        contender.add()
        times.append(time.perf_counter() - started)
    return {"sum_s": median(times)}


def make(contender: str, case: Any, rank: int, folder: str) -> Any:
    """Return the object that sums or trains for a case. Its `num_devices` are processes."""
    is_torch = contender.startswith("torch")
    if case.workload == "sum":
        return (GlooSums if is_torch else StoreSums)(case, rank, folder)
    if not is_torch:
        import with_mxnet

        return with_mxnet.Ours(replace(case, num_devices=1))
    import with_torch

    if case.num_devices == 1:
        return with_torch.Eager(case)
    return with_torch.Rank(case, rank, os.path.join(folder, RENDEZVOUS))


def serve(contender: str, rank: int, folder: str, requests: Iterable[bytes]) -> Iterable[Dict[str, Any]]:
    """Yield the answer to each request, as `worker.serve` does. The first answer, without a request, gives rank and versions."""
    try:
        yield {"rank": rank, "versions": {"python": sys.version.split()[0], **_versions(contender)}}
        from case import Case
        from measure import run_round  # needs NumPy, which the Python of a contender may lack

        ready: Dict[str, Any] = {}
        for line in requests:
            request = json.loads(line)
            if "setup" in request:
                case = Case(**request["case"])
                ready[request["setup"]] = make(contender, case, rank, folder), case
                yield {}
            else:
                made, case = ready[request["round"]]
                yield {"found": (sum_round if case.workload == "sum" else run_round)(made, case)}
    except Exception as error:
        yield {"failed": worker.reason_of(error)}


def main(arguments: List[str]) -> None:
    """Serve the contender of the first argument through the socket in the folder of the second."""
    contender, folder = arguments
    worker.prepare_imports(with_package=not contender.startswith("torch"))
    rank = int(os.environ["GLUON_MGPU_RANK"])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(folder, ADDRESS))
        with connection.makefile("rb") as requests:
            for answer in serve(contender, rank, folder, requests):
                connection.sendall(json.dumps(answer).encode() + b"\n")


def _check(sums: Any, num_processes: int) -> None:
    if float(sums.min()) != num_processes or float(sums.max()) != num_processes:
        raise RuntimeError(f"a sum of {num_processes} ones is {float(sums.min()):g} to {float(sums.max()):g}")


def _versions(contender: str) -> Dict[str, str]:
    if contender.startswith("torch"):
        import with_torch

        return with_torch.Eager.versions()
    import with_mxnet

    found = with_mxnet.Ours.versions()
    if contender == "horovod":
        found["horovod"] = importlib.import_module("horovod").__version__
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
