"""Several processes on one machine or on many: who each is, and what starts, watches and ends them."""

from .process import LaunchError, Process, this_process

__all__ = ["LaunchError", "Process", "this_process"]
