"""Inspects this machine and reports its problems."""

from .findings import Problem
from .report import Report, examine

__all__ = ["Problem", "Report", "examine"]
