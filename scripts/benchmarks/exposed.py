"""A model of the time that a step waits for sums and weights on several GPUs: calculated, not measured.

```
backward pass   │ last layers ─────────► front layers │
sums            │     ═══  ═══  ═══  ═══  ═══  ═══════│═══
weights         │                 ═══  ═══  ═══  ═════│══════│
                                                      └exposed┘
```

It assumes that each GPU has one link, that this carries so many GB/s in each direction at once, and that copies alone take time:
no update, no kernels, no gaps between copies. Each sum is computed by the device that owns the slab. A gradient is ready when the
backward pass has come to its layer, which takes time in proportion to its bytes; that of an embedding is ready last.
"""

from __future__ import annotations

import heapq
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

from report import Table

_LAYER = [4 * 768 * 768] * 4 + [4 * 768 * 3072] * 2  # of BERT-base, without biases
NETWORKS: Dict[str, List[float]] = {  # bytes of parameters in float32, in order of use; the first one is the embedding
    "embedding": [4 * 32000 * 768],
    "bert-base": [4 * 30522 * 768, 4 * 512 * 768, *_LAYER * 12],
}


class Piece(NamedTuple):
    """What one sum is over: bytes, when they are ready, and the device that owns them."""

    size: float
    ready_s: float
    owner: int


def pieces(sizes: Sequence[float], num_gpus: int, backward_s: float, bucket: float, cut: Optional[float]) -> Iterator[Piece]:
    """Yield the slabs of parameters, in the order of the backward pass, as `Layout` divides them and chooses their owners."""
    slabs = _buckets(sizes, bucket)
    sums = [sum(sizes[number] for number in slab) for slab in slabs]
    are_cut = [cut is not None and len(slab) == 1 and size > cut for slab, size in zip(slabs, sums)]
    held, owners = [0.0] * num_gpus, [0] * len(slabs)
    for at in sorted(range(len(slabs)), key=lambda at: (-sums[at], -at)):  # the largest first
        if not are_cut[at]:
            owners[at] = held.index(min(held))
            held[owners[at]] += sums[at]
    computed, total = 0.0, sum(sizes[1:])
    for slab, size, is_cut, owner in zip(slabs, sums, are_cut, owners):
        computed += sum(sizes[number] for number in slab if number)
        ready_s = backward_s * (computed / total if total else 1)
        if is_cut:
            yield from (Piece(size / num_gpus, ready_s, each) for each in range(num_gpus))
        else:
            yield Piece(size, ready_s, owner)


def exposed_s(found: Sequence[Piece], num_gpus: int, backward_s: float, bytes_per_s: float, *, waits: bool) -> float:
    """Return the seconds from the end of the backward pass until all devices have all weights.

    With `waits`, no weight is copied before all sums are there, as for a loss scale.
    """
    into, out_of = [0.0] * num_gpus, [0.0] * num_gpus  # when the links are free
    end, num_sums = 0.0, 0

    def copied(links: List[float], others: List[float], piece: Piece, begin: float) -> float:
        """The owner's link carries a copy for each other device, and theirs one each. Return when all are done."""
        one_s = piece.size / bytes_per_s
        links[piece.owner] = done = max(begin, links[piece.owner]) + (num_gpus - 1) * one_s
        for device in range(num_gpus):
            if device != piece.owner:
                others[device] = max(begin, others[device]) + one_s
                done = max(done, others[device])
        return done

    events = [(piece.ready_s, number, True) for number, piece in enumerate(found)]
    heapq.heapify(events)
    while events:
        now, number, is_sum = heapq.heappop(events)
        done = copied(*((into, out_of) if is_sum else (out_of, into)), found[number], now)
        end, num_sums = max(end, done), num_sums + is_sum
        if is_sum and not waits:
            heapq.heappush(events, (done, number, False))
        elif is_sum and num_sums == len(found):
            events = [(end, one, False) for one in range(num_sums)]
    return max(0.0, end - backward_s)


def table(
    sizes: Sequence[float], num_gpus: Sequence[int], bytes_per_s: float, step_s: float, bucket: float, most: float
) -> Table:
    """Return the table of exposed milliseconds of a step, with one owner for each parameter, and with parameters that are cut.

    Parameters
    ----------
    bucket, most : bytes
        Of a bucket, and of a parameter that is not cut.
    """
    lines, backward_s = [], step_s * 2 / 3
    for number in num_gpus:
        line = [str(number)]
        for waits in (False, True):
            for cut in (None, most):
                found = list(pieces(sizes, number, backward_s, bucket, cut))
                line.append(f"{1000 * exposed_s(found, number, backward_s, bytes_per_s, waits=waits):.1f}")
        lines.append([*line, str(len(found))])
    columns = ["GPUs", "one owner", "cut", "one owner, loss scale", "cut, loss scale", "sums, cut"]
    return f"Exposed ms of a step of {1000 * step_s:g} ms, calculated", columns, lines


def _buckets(sizes: Sequence[float], bucket: float) -> List[List[int]]:
    """Return the parameters of each bucket, the last ones first: see `gluon_mgpu.trainer.slab.place`."""
    most = min(bucket, max(2**20, sum(sizes) / 16))
    found: List[List[int]] = []
    filled = most
    for number in reversed(range(len(sizes))):
        if filled + sizes[number] > most:
            found.append([])
            filled = 0
        found[-1].append(number)
        filled += sizes[number]
    return found
