"""The machine and MXNet, made ready before anything trains: environment, threads, engine, CUDA libraries, NVIDIA's driver."""

from .environment import Setting, is_off, require, set_threads, settings
from .openmp_threads import num_cores, threads_of

__all__ = ["Setting", "is_off", "num_cores", "require", "set_threads", "settings", "threads_of"]
