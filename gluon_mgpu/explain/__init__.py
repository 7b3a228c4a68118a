"""Error messages, what causes them and what to do."""

from .entries import ENTRIES, Entry
from .match import Answer, explain_log, explain_message

__all__ = ["ENTRIES", "Entry", "Answer", "explain_log", "explain_message"]
