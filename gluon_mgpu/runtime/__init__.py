"""The machine and MXNet, made ready before anything trains: environment, threads, engine, CUDA libraries, NVIDIA's driver."""

from .environment import is_off, require, set_threads
from .openmp_threads import num_cores, threads_of

__all__ = ["is_off", "num_cores", "require", "set_threads", "threads_of"]
