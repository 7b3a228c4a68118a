"""The largest batch size that fits, and the recommended one; each size is tried in a separate process."""

from .find import BatchSizes, Probe, find_batch_size, recommend, search

__all__ = ["BatchSizes", "Probe", "find_batch_size", "recommend", "search"]
