"""Networks divided over devices: stages, micro-batches, schedules, recomputation."""
