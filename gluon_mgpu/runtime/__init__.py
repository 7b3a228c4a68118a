"""The machine and MXNet, made ready before anything trains: environment, threads, engine, CUDA libraries, NVIDIA's driver."""

from .environment import Setting, is_debug, is_off, load_mxnet, require, settings, settle_threads
from .threads import num_cores, threads_of

__all__ = ["Setting", "is_debug", "is_off", "load_mxnet", "num_cores", "require", "settings", "settle_threads", "threads_of"]
