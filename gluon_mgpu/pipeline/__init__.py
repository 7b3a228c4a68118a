"""Networks divided over devices: stages, micro-batches, schedules, recomputation."""

from ..runtime import loaded as loaded
