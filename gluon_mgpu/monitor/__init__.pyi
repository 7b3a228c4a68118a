"""The names of this room and their modules: __init__.py imports each at its first use."""

from .figures import plot_samples as plot_samples
from .leaks import LeakCheck as LeakCheck
from .monitor import Monitor as Monitor
from .reader import Reader as Reader
from .sample import GpuSample as GpuSample
from .sample import HostSample as HostSample
from .sample import Sample as Sample
from .sample import Summary as Summary
from .sample import read_samples as read_samples
from .sample import summarise as summarise
from .timer import Timer as Timer
from .watchdog import Watchdog as Watchdog
