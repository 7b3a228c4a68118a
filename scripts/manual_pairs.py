"""Prints English-Korean pairs, tab between, of manuals that Debian packages hold: sentences of one topic, mostly long.

apt-get download gnome-user-docs gimp-help-en gimp-help-ko && for file in *.deb; do dpkg -x $file manuals; done
python scripts/manual_pairs.py manuals > manuals.tsv
"""

from __future__ import annotations

import html
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Iterator, List, Tuple


def texts_of(path: Path) -> List[str]:
    """Return the paragraphs and titles of a page of GNOME's help (XML) or of GIMP's (HTML)."""
    if path.suffix == ".page":
        elements = ElementTree.parse(path).getroot().iter()
        texts = ["".join(one.itertext()) for one in elements if one.tag.split("}")[-1] in ("p", "title", "desc")]
    else:
        found = re.findall(r"<(?:p|h\d|dt|title)\b[^>]*>(.*?)</(?:p|h\d|dt|title)>", path.read_text("utf-8"), re.DOTALL)
        texts = [html.unescape(re.sub(r"<[^>]+>", "", text)) for text in found]
    return [re.sub(r"\s+", " ", text).strip() for text in texts]


def pages(folder: Path) -> Iterator[Tuple[Path, Path]]:
    """Yield the paths of each page in English and in Korean."""
    for english in sorted(folder.glob("usr/share/help/C/**/*.page")):
        yield english, Path(str(english).replace("/help/C/", "/help/ko/"))
    for english in sorted(folder.glob("usr/share/gimp/**/help/en/**/*.html")):
        yield english, Path(str(english).replace("/help/en/", "/help/ko/"))


def is_translated(english: str, korean: str) -> bool:
    """Return whether both sides are text of about the same length, at most 500 and 400 characters."""
    num_words, num_hangul = len(re.findall("[A-Za-z]+", english)), len(re.findall("[가-힣]", korean))
    return num_words >= 4 and len(english) <= 500 and len(korean) <= 400 and 12 * num_hangul > len(english)


def pairs(folder: Path) -> Iterator[Tuple[str, str]]:
    """Yield the sentences of paragraphs that have as many in both languages; other paragraphs as a whole."""
    for paths in pages(folder):
        if all(path.exists() for path in paths):
            both = [texts_of(path) for path in paths]
            for paragraph in zip(*both) if len(both[0]) == len(both[1]) else ():
                sides = [re.split(r"(?<=[.?!])\s+", text) for text in paragraph]
                yield from zip(*sides) if len(sides[0]) == len(sides[1]) else [paragraph]


if __name__ == "__main__":
    for pair in dict.fromkeys(pair for pair in pairs(Path(sys.argv[1])) if is_translated(*pair)):
        print(*pair, sep="\t")
