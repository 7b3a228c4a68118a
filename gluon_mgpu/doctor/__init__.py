"""What is on this machine, and what is wrong with it: recorded first, then judged."""

from .findings import Problem
from .report import Report, examine
from .tables import Table, tables_of

__all__ = ["Problem", "Report", "Table", "examine", "tables_of"]
