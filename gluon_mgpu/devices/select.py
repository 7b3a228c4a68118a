"""Device specifications to lists of contexts: use_devices()."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import Iterator, List, Optional, Sequence, Union

import mxnet as mx
from mxnet import Context

from ..checks import is_whole, short, whole_number
from ..errors import DeviceError, last_line
from ..mxnet_internals.versions import ContextType
from ..runtime import environment
from ..runtime.nvidia.demand import Demand, num_bytes
from . import free_gpus, mxnet_gpus

DeviceSpec = Union[None, str, int, Context, Sequence[Context]]

# Each CPU context starts a thread, and threads are counted for each: 256 take 1 s, 512 4 s, 1,024 12 s, 2,048 59 s.
MOST_DEVICES = 1024
_MOST_NUMBERS = 10**6  # as in texts

_FORMS = (
    "Use 'auto', 'gpu', 'gpu*2' (a count), 'gpu:4-7', 'gpu:0,2' (numbers), 'gpu:free', 'gpu:free*2', 'cpu*2', 'cpu:0,gpu:0', "
    "2, or contexts."
)


@contextmanager
def use_devices(
    spec: DeviceSpec = None, *, min_free_memory: Union[None, int, str] = None, one_thread: bool = False
) -> Iterator[List[Context]]:
    """Yield the contexts of `spec`; the first one is the default context inside the block.

    At its end, the block waits for the devices and raises pending errors: MXNet reports an operation's error only when the
    program waits for it. An exception of the block itself takes precedence.

    Parameters
    ----------
    spec : None, str, int, mxnet.Context or sequence of mxnet.Context
        See `resolve_devices` for this and the other arguments.
    min_free_memory : None, int or str
    one_thread : bool
        Let a single CPU context compute with one thread, as each of several does: for the same bits on any number of devices
        (`Trainer(virtual_shards=8)`).

    Raises
    ------
    DeviceError
        The spec is malformed, names a device twice, or names one that does not exist or is not free.
    mxnet.MXNetError
        A queued operation failed on a device.

    Examples
    --------
    >>> with use_devices("cpu*2") as ctx:
    ...     print(ctx, mx.current_context())
    [cpu(0), cpu(1)] cpu(0)
    """
    with environment.one_thread(one_thread):
        contexts = resolve_devices(spec, min_free_memory=min_free_memory)
    with contexts[0]:
        try:
            yield contexts
        except BaseException:
            _wait_quietly()
            raise
        mx.nd.waitall()


def _wait_quietly() -> None:
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        environment.logger.warning("use_devices: while another error was raised, a device reported: %s", last_line(error))


def resolve_devices(spec: DeviceSpec = None, *, min_free_memory: Union[None, int, str] = None) -> List[Context]:
    """Return the contexts of `spec`. Unlike `use_devices`, it sets no default context and waits for nothing.

    Parameters
    ----------
    spec : None, str, int, mxnet.Context or sequence of mxnet.Context
        - `None` or `"auto"`: every GPU that MXNet can run on, else `cpu(0)`. Only this falls back to the CPU.
        - an int n, or `"n"`: the first n GPUs if MXNet can run on any, else n CPU contexts.
        - `"gpu"`, `"gpu*2"`: all GPUs, or the first two that MXNet can run on. A count stands after `*`, a number after `:`.
        - `"gpu:1"`, `"gpu:4-7"`, `"gpu:0,2"`: the GPUs with these numbers.
        - `"gpu:free"`, `"gpu:free*2"`: all free GPUs (see `request.why_not_free`), or the two with the most free memory, the
          most free first. Nothing reserves them: another job that starts at the same time may choose the same ones.
        - `"cpu"`, `"cpu*2"`: one CPU context, or `cpu(0)` and `cpu(1)`.
        - `"cpu:0,gpu:0"`: a list of devices, each with its number.
        - contexts: checked and returned.
    min_free_memory : None, int, bytes, or str
        Memory that must be free on each GPU: `8 * 2**30`, `"8GiB"`. `"auto"` and a count then choose among the GPUs that have
        it; if none has, `"auto"` takes the CPU.

    Raises
    ------
    DeviceError
        The spec is malformed, names a device twice, or names one that does not exist or is not free; or the driver cannot be
        read.

    Examples
    --------
    >>> resolve_devices("cpu*2")
    [cpu(0), cpu(1)]
    >>> resolve_devices("cpu:0,cpu:3")
    [cpu(0), cpu(3)]
    >>> resolve_devices("tpu")
    Traceback (most recent call last):
    gluon_mgpu.errors.DeviceError: use_devices: got 'tpu'; expected a device name. ...
    """
    if isinstance(spec, str):
        spec = re.sub(r"\((\d+)\)", r":\1", re.sub(r"\s+", "", spec.lower()))  # "cpu(0), cpu(1)", as contexts are printed, too
        spec = int(spec) if re.fullmatch(r"[0-9]{1,9}", spec) else spec
    demand = _demand(spec, num_bytes(min_free_memory))
    contexts = _named(spec) if demand is None else _contexts_for(demand)
    check_contexts(contexts, "use_devices", spec)
    for context in contexts:
        _check_present(context)
    return contexts


def _named(spec: DeviceSpec) -> List[Context]:
    """Return the contexts of a spec that does not request free GPUs."""
    if _is_auto(spec):
        return mxnet_gpus.usable_gpus() or [mx.cpu(0)]
    if is_whole(spec):
        return _first(int(spec))
    if _num_gpus_of(spec):
        return _first(_num_gpus_of(spec), of_gpus=True)
    if isinstance(spec, str):
        return _parse(spec)
    if isinstance(spec, ContextType):
        return [spec]
    if isinstance(spec, (list, tuple)):
        return list(spec)
    raise DeviceError(f"use_devices: got {short(spec)} of type {type(spec).__name__}; expected a device spec. {_FORMS}")


def _is_auto(spec: DeviceSpec) -> bool:
    return spec is None or (isinstance(spec, str) and spec == "auto")


def _num_gpus_of(spec: DeviceSpec) -> int:
    """Return n of "gpu*n", 0 for other specs."""
    count = re.fullmatch(r"gpu\*([1-9][0-9]{0,5})", spec) if isinstance(spec, str) else None
    return int(count.group(1)) if count else 0


def _demand(spec: DeviceSpec, min_free_bytes: int) -> Optional[Demand]:
    """Return the demand for free GPUs or free memory; None if there is no such demand."""
    free_spec = re.fullmatch(r"gpu:free(?:\*([1-9][0-9]{0,3}))?", spec) if isinstance(spec, str) else None
    if free_spec:
        return Demand(str(spec), None, int(free_spec.group(1)) if free_spec.group(1) else None, True, min_free_bytes)
    if not min_free_bytes:
        return None
    if _is_auto(spec):
        return Demand("auto", None, None, False, min_free_bytes, may_be_none=True)
    count = int(spec) if is_whole(spec) else _num_gpus_of(spec)
    if is_whole(spec) or count:
        return Demand(str(spec), None, _counted(count), False, min_free_bytes)
    contexts = _named(spec)
    check_contexts(contexts, "use_devices", spec)
    if any(context.device_type != "gpu" for context in contexts):
        raise DeviceError(f"use_devices: got {contexts} with min_free_memory; expected only GPUs. Leave it out on CPUs.")
    text = str(spec) if isinstance(spec, str) else ", ".join(map(str, contexts))
    return Demand(text, tuple(context.device_id for context in contexts), None, False, min_free_bytes)


def _contexts_for(demand: Demand) -> List[Context]:
    """Return the GPUs that satisfy a demand; the CPU if there are none and the demand allows it."""
    if demand.may_be_none and not mxnet_gpus.num_gpus():
        return [mx.cpu(0)]
    _check_seen(mx.gpu(0))
    return [mx.gpu(device.number) for device in free_gpus.acquire(demand)] or [mx.cpu(0)]


def check_contexts(contexts: Sequence[Context], operation: str, spec: DeviceSpec = None) -> None:
    """Raise `DeviceError` unless these are one or more different CPU or GPU contexts; set their numbers of threads.

    If they come from a spec, an error about it explains numbers and counts.
    """
    if not isinstance(contexts, (list, tuple)) or not contexts:
        raise DeviceError(
            f"{operation}: got {short(contexts)} for the devices; expected a list of contexts. Pass [mx.cpu(0)], or "
            "resolve_devices('cpu*2')."
        )
    for context in contexts:
        is_known = isinstance(context, ContextType) and context.device_type in ("cpu", "gpu")
        if not (is_known and 0 <= context.device_id < _MOST_NUMBERS):  # of others, operations fail, and then all wait forever
            raise DeviceError(f"{operation}: got {short(context)} among the devices; expected mx.cpu(i) or mx.gpu(i). {_FORMS}")
    if len({(context.device_typeid, context.device_id) for context in contexts}) < len(contexts):
        twice = next(context for i, context in enumerate(contexts) if context in contexts[:i])
        raise DeviceError(f"{operation}: got {twice} twice in {short(contexts)}; expected different devices. Name each once.")
    for context in contexts:
        if context.device_type == "gpu":
            _check_seen(context, operation, spec)
    environment.set_threads(contexts)


def try_gpu(i: int = 0) -> Context:
    """Return `gpu(i)` if MXNet can run on it, else `cpu()`.

    Examples
    --------
    >>> try_gpu(99)
    cpu(0)

    Source: d2l, chapter "GPUs".
    """
    whole_number("try_gpu", "i", i, low=0, advice="The first GPU is try_gpu(0).", error=DeviceError)
    return mx.gpu(i) if mx.gpu(i) in mxnet_gpus.usable_gpus() else mx.cpu()


def try_all_gpus() -> List[Context]:
    """Return all GPUs that MXNet can run on, or `[cpu()]` if there are none.

    d2l 1.0.3 documents the same, but returns an empty list.

    Source: d2l, chapter "GPUs".
    """
    return mxnet_gpus.usable_gpus() or [mx.cpu()]


def _first(num_devices: int, *, of_gpus: bool = False) -> List[Context]:
    gpus = mxnet_gpus.usable_gpus()
    _counted(num_devices)
    if of_gpus and not gpus:
        _check_present(mx.gpu(0))  # raises, and says why
    if gpus and num_devices > len(gpus):
        raise DeviceError(
            f"use_devices: got {num_devices} devices; expected at most {len(gpus)}, the GPUs that MXNet can run on. "
            f"Pass 'cpu*{num_devices}' to use CPU contexts instead."
        )
    return gpus[:num_devices] or [mx.cpu(i) for i in range(num_devices)]


def _counted(num_devices: int) -> int:
    """Return the number of devices; raise `DeviceError` if it is none, or starting their threads would take minutes."""
    if not 1 <= num_devices <= MOST_DEVICES:
        raise DeviceError(f"use_devices: got {short(num_devices)} devices; expected 1 to {MOST_DEVICES}. {_FORMS}")
    return num_devices


def _parse(spec: str) -> List[Context]:
    """Return the contexts of a spec such as 'gpu:0,2', 'gpu:4-7', 'cpu:0,gpu:0', 'cpu*2'."""
    count = re.fullmatch(r"cpu(?:\*([0-9]{1,9}))?", spec)
    if count:
        return [mx.cpu(i) for i in range(_counted(int(count.group(1) or 1)))]
    if spec == "gpu":
        _check_seen(mx.gpu(0))
        return [mx.gpu(i) for i in range(mxnet_gpus.num_gpus())]
    contexts: List[Context] = []
    kind = ""
    for item in spec.split(","):
        match = re.fullmatch(r"(?:(cpu|gpu):)?([0-9]{1,6})(?:-([0-9]{1,6}))?", item)
        kind = match.group(1) or kind if match else ""
        if not match or not kind:
            raise DeviceError(f"use_devices: got {short(spec)}; expected a device name. {_FORMS}")
        first, last = int(match.group(2)), int(match.group(3) or match.group(2))
        if last < first:
            raise DeviceError(f"use_devices: got {first}-{last}; expected the smaller number first. {_FORMS}")
        _counted(len(contexts) + last - first + 1)
        contexts += [ContextType(kind, i) for i in range(first, last + 1)]
    return contexts


def _check_seen(context: Context, operation: str = "use_devices", spec: DeviceSpec = None) -> None:
    if context.device_id >= mxnet_gpus.num_gpus():
        number = re.fullmatch(r"gpu:([1-9][0-9]*)", spec) if isinstance(spec, str) else None
        hint = f"{spec!r} is a number, not a count: 'gpu*{number.group(1)}' requests that many GPUs. " if number else ""
        there = ", ".join(f"gpu({i})" for i in range(mxnet_gpus.num_gpus())) or "none"
        raise DeviceError(
            f"{operation}: got {context}; expected one of the GPUs that MXNet can see ({there}). {hint}{mxnet_gpus.why_none()} "
            "'auto' takes the CPU if there is no GPU; 'cpu*2' requests two CPU contexts."
        )


def _check_present(context: Context) -> None:
    if context.device_type != "gpu":
        return
    _check_seen(context)
    reason = mxnet_gpus.why_not(context.device_id)
    if reason:
        to_do = mxnet_gpus.what_to_do(context.device_id)
        raise DeviceError(
            f"use_devices: got {context}; expected a GPU that MXNet can run on. {reason.rstrip('.')}. {to_do}".rstrip()
        )
