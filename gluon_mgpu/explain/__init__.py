"""Error messages, what causes them and what to do."""

from .entries import ENTRIES, Entry
from .logs import explain_log
from .match import Answer, explain_message
from .systems import System, system_note

__all__ = ["ENTRIES", "Entry", "Answer", "System", "explain_log", "explain_message", "system_note"]
