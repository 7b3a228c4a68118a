"""What the processes of a job must have in common: described in words, and compared."""

from __future__ import annotations

import json
import re
import zlib
from typing import Dict, List, Mapping, Sequence, Set, Tuple

import numpy as np
from mxnet import gluon

from ..distributed import Group
from ..errors import TrainerError

Facts = Mapping[str, object]  # by the words in which errors name them

LABELS = "checksum of the labels of the first batch"
SAME = "Build the same network and trainer in each, and change them in all before the same step"
_ALIKE = "Shuffle alike, for example after np.random.seed(0), or let each read its own data: Trainer(sharded_data=True)"


def described(
    names: Sequence[str], params: Sequence[gluon.Parameter], *, structural: bool, options: bool = True
) -> Dict[str, str]:
    """Return what makes parameters the same, by words for errors; with `options`, also what makes their updates the same."""
    found = {"number of parameters": str(len(params))}
    own = _uncounted([param.name for param in params])
    for place, (name, gluons, param) in enumerate(zip(names if structural else _uncounted(names), own, params)):
        what = f"parameter {place}"
        found.update({what: name, f"Gluon's name of {what}": gluons, f"shape of {what}": str(param.shape)})
        found[f"dtype of {what}"] = np.dtype(param.dtype).name
        if options:
            found.update({f"{one} of {what}": str(getattr(param, one)) for one in ("grad_req", "lr_mult", "wd_mult")})
    return found


def named(what: str, names: Sequence[str]) -> str:
    """Return a word of `described` with this process's name of the parameter."""
    return re.sub(" of parameter ([0-9]+)$", lambda found: f" of {names[int(found[1])]}", what)


def _uncounted(names: Sequence[str]) -> List[str]:
    """Return names with the numbers from 0 that Gluon counts up in a process, which may have made other layers before.

    Examples
    --------
    >>> _uncounted(["dense12_weight", "dense7_weight", "net3_dense0_bias"])
    ['dense1_weight', 'dense0_weight', 'net0_dense0_bias']
    """
    parts = [re.split("([0-9]+)", name) for name in names]
    for at in range(1, max(map(len, parts)), 2):
        numbers: Dict[Tuple[str, ...], Set[str]] = {}
        for one in parts:
            numbers.setdefault(tuple(one[:at]), set()).update(one[at : at + 1])
        ranks = {before: sorted(found, key=lambda text: (len(text), text)) for before, found in numbers.items()}
        for one in parts:
            one[at : at + 1] = [str(ranks[tuple(one[:at])].index(number)) for number in one[at : at + 1]]
    return ["".join(one) for one in parts]


def check_same(operation: str, processes: Group, facts: Facts, names: Sequence[str], advice: str = "") -> None:
    """Raise `TrainerError` if facts differ between the processes: it names the first one and the ranks. Waits for all."""
    own = json.dumps({name: str(value) for name, value in facts.items()}).encode()
    if len(set(processes.all_gather_bytes(str(zlib.crc32(own)).encode()))) == 1:
        return
    everyones: List[Dict[str, str]] = [json.loads(one) for one in processes.all_gather_bytes(own)]
    for name in dict.fromkeys(name for one in everyones for name in one):
        ranks: Dict[str, List[int]] = {}
        for rank, one in enumerate(everyones):
            ranks.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"{value} in rank {', '.join(map(str, those))}" for value, those in ranks.items())
            what, advice = named(name, names), advice or (_ALIKE if name in (LABELS, "batch size") else SAME)
            raise TrainerError(f"{operation}: got {what}: {found}; expected the same in all processes. {advice}.")
