"""Write the index of error messages into docs/troubleshooting.md, from gluon_mgpu/explain/entries.txt."""

import re
from pathlib import Path

from gluon_mgpu.explain import ENTRIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
INDEX = re.compile(r"(?<=<!-- index of messages -->\n).*?(?=<!-- end of the index -->\n)", re.DOTALL)


def index() -> str:
    """Return a table of all entries for each of their origins."""
    parts = []
    for origin in dict.fromkeys(entry.origin for entry in ENTRIES):
        parts.append(f"\n### {origin}\n\n| message | cause | what to do |\n|---|---|---|\n")
        for entry in ENTRIES:
            if entry.origin == origin:
                shown = "<br>".join(f"`` {text} ``" if "`" in text else f"`{text}`" for text in entry.messages[:2])
                link = entry.link.replace("troubleshooting.md#", "#")
                parts.append(f"| {shown.replace('|', chr(92) + '|')} | {entry.cause} | {entry.fix} [{entry.name}]({link}) |\n")
    return "".join(parts) + "\n"


def main() -> None:
    """Replace the index in the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(INDEX.sub(lambda _: index(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
