"""Records what the devices and the host do while a program trains, finds leaks and stalls, and measures time.

```
while fit runs  Monitor, LeakCheck, Watchdog
time            Timer
samples         Reader, read_samples, summarise, plot_samples, Sample, GpuSample, HostSample, Summary
```
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
