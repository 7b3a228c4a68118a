"""Inspects this machine and reports its problems."""

from .findings import Problem
from .report import Report, examine
from .tables import Table, instructions, tables_of

__all__ = ["Problem", "Report", "Table", "examine", "instructions", "tables_of"]
