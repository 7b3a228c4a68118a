"""Measure and choose: batch size, agreement of devices, profiles."""
