"""Other systems than Linux on x86-64: where a message comes from, and what of an answer does not work there."""

from __future__ import annotations

import re
import sys
from typing import NamedTuple, Optional, Pattern, Tuple

from .entries import Entry

_COMMANDS = re.compile(r"pip install|mxnet-cu|1\.9\.1|apt-get|LD_LIBRARY_PATH|/dev/shm|ulimit")  # of an answer for Linux


class System(NamedTuple):
    """A system: how messages show it, how an answer names it, and a note in English and Korean."""

    signs: Pattern[str]
    named: Pattern[str]
    note: str
    note_ko: str


_SYSTEMS: Tuple[System, ...] = (
    System(
        re.compile(
            r"(?<![A-Za-z/])[A-Za-z]:(?:\\|/(?!/))|\\site-packages\\|\bwin_amd64|\bWinError|\.vcxproj|\bLNK\d{4}|\.dll\b|\bMSVC|"
            r"Visual Studio"
        ),
        re.compile(r"Windows|WSL"),
        "On Windows, PyPI's last MXNet is 1.7.0.post2, for CPUs and Python up to 3.7; with CUDA it is `mxnet-cu101==1.5.0`. Use "
        "MXNet 1.9.1 and commands such as `apt-get` in WSL 2 or a Linux container.",
        "Windows용으로 PyPI에 있는 마지막 MXNet은 CPU와 파이썬 3.7 이하를 위한 1.7.0.post2이며, CUDA용은 "
        "`mxnet-cu101==1.5.0`입니다. MXNet 1.9.1과 `apt-get` 같은 명령은 WSL 2나 Linux 컨테이너에서 사용하세요.",
    ),
    System(
        re.compile(r"(?<![A-Za-z:])/Users/|/opt/homebrew|/private/(?:var|tmp)/|\.dylib\b|macosx_|\bDarwin\b|\bmacOS\b"),
        re.compile(r"macOS|\bMacs?\b|Apple|brew"),
        "On macOS, MXNet 1.9.1 has a wheel for Intel Macs, for CPUs only. On Apple silicon, use a Linux container, or the fork "
        "smolix/mxnet (MXNet 2). CUDA and `apt-get` need Linux.",
        "macOS에는 MXNet 1.9.1의 Intel Mac용 CPU 휠만 있습니다. Apple silicon에서는 Linux 컨테이너나 "
        "포크 smolix/mxnet(MXNet 2)을 사용하세요. CUDA와 `apt-get`에는 Linux가 필요합니다.",
    ),
    System(
        re.compile(r"aarch64|arm64|\barmv[78]|Jetson|\bL4T\b|\btegra", re.IGNORECASE),
        re.compile(r"arm64|\bARM\b|\bArm\b|Jetson|aarch64"),
        "On arm64, the wheel `mxnet==1.9.1` is for CPUs and needs Arm Performance Libraries, which Arm offers. There is no wheel "
        "with CUDA: on a Jetson, build MXNet from source.",
        "arm64의 `mxnet==1.9.1` 휠은 CPU용이며, Arm이 제공하는 Arm Performance Libraries가 필요합니다. "
        "CUDA용 휠은 없으므로 Jetson에서는 MXNet을 소스에서 빌드하세요.",
    ),
)
_HERE = {"win32": 0, "darwin": 1}.get(sys.platform)


def system_note(text: str, entry: Entry) -> Optional[System]:
    """Return the system that a message comes from, if the answer holds commands that do not work there and does not name it."""
    found = next((system for system in _SYSTEMS if system.signs.search(text)), None)
    if found is None and _HERE is not None:
        found = _SYSTEMS[_HERE]
    return found if found and _COMMANDS.search(entry.fix) and not found.named.search(entry.fix) else None
