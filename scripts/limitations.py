"""Write the table of modes that exclude each other into docs/limitations.md, from gluon_mgpu/refusals.py.

python scripts/limitations.py
"""

from __future__ import annotations

import re
from pathlib import Path

from gluon_mgpu.refusals import REFUSALS

PAGE = Path(__file__).parent.parent / "docs" / "limitations.md"
_BETWEEN = re.compile(r"(?<=<!-- refusals -->\n).*?(?=<!-- end of refusals -->)", re.DOTALL)


def page() -> str:
    """Return the page with the table as it is declared."""
    rows = [f"| {' | '.join(one)} |" for one in REFUSALS]
    table = "\n".join(["| mode | refuses | because | instead |", "|---|---|---|---|", *rows, ""])
    return _BETWEEN.sub(lambda _: table, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
