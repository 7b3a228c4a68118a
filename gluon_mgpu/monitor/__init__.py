"""Monitors devices and host while a program trains, and finds problems and their causes."""

from .callback import Monitor as Monitor
from .diagnosis import diagnose as diagnose
from .finding import Finding as Finding
from .plot import plot_samples as plot_samples
from .reader import Reader as Reader
from .sample import CpuSample as CpuSample
from .sample import GpuSample as GpuSample
from .sample import HostSample as HostSample
from .sample import LiveArrays as LiveArrays
from .sample import Sample as Sample
from .sample import read_samples as read_samples
from .summary import Summary as Summary
from .summary import summarise as summarise
