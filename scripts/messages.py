"""Write docs/messages.md: the messages that `gluon-mgpu explain` knows, from gluon_mgpu/doctor/known_errors.txt.

python scripts/messages.py
"""

from __future__ import annotations

from pathlib import Path

from gluon_mgpu.doctor.known_errors import entries

PAGE = Path(__file__).parent.parent / "docs" / "messages.md"


def page() -> str:
    """Return one table for each group of entries, with the likeliest remedy."""
    lines = ["# Error messages", "", "Reference. `gluon-mgpu explain NAME` shows all remedies; `…` stands for any text."]
    for group in dict.fromkeys(entry.group for entry in entries()):
        lines += ["", f"## {group}", "", "| message | cause | likeliest remedy |", "|---|---|---|"]
        for entry in entries():
            shown = f"`` {entry.has[0]} ``".replace("|", "\\|")
            lines += [f"| {shown} | {entry.why} | {entry.todo[0]} [{entry.name}]({entry.see}) |"] if entry.group == group else []
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
