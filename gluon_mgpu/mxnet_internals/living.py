"""Objects that no one refers to from here: searched for among all of this process."""

from __future__ import annotations

import gc
from typing import Any, List


def living(kind: type) -> List[Any]:
    """Return all objects of a class in this process. What the program has frozen with `gc.freeze()` stays frozen.

    Another thread that builds a tuple meanwhile may raise `SystemError`: CPython shows unfinished objects here (bpo-15108).
    """
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # get_objects() does not list those
        gc.collect()  # so that no garbage is frozen with them
        gc.unfreeze()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]  # calls nothing of the things
    if is_frozen:
        gc.freeze()
    return found


def free_stores(mxnet: Any) -> None:
    """End the threads of MXNet's stores at once: they would run on at the exit of the process, and abort it."""
    for store in living(mxnet.kvstore.kvstore.KVStore):
        # freed, it would wait for workers that wait for this one
        mxnet.base._LIB.MXKVStoreSetBarrierBeforeExit(store.handle, 0)
        store.__del__()
        store.handle.value = None  # so that a second __del__ does nothing
