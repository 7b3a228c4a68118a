"""Inspects this machine and reports its problems."""

from .findings import Problem
from .report import Report, examine
from .tables import Table, tables_of

__all__ = ["Problem", "Report", "Table", "examine", "tables_of"]
