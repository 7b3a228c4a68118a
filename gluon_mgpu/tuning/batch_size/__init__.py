"""The largest batch that fits, and the one to take: each size tried in a process of its own."""

from .find import BatchSizes, Probe, find_batch_size, recommend, search

__all__ = ["BatchSizes", "Probe", "find_batch_size", "recommend", "search"]
