"""The scripts behind the figures of translators on text."""

import json
import runpy
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_pairs_of_manuals_are_sentences_of_the_same_place(tmp_path):
    page = '<page xmlns="http://projectmallard.org/1.0/"><title>{}</title><p>{}</p></page>'
    english, korean = "Open all the files. Then close them all.", "모든 파일을 엽니다. 그리고 모두 닫습니다."
    write(tmp_path / "usr/share/help/C/a/one.page", page.format("Not translated in this manual", english))
    write(tmp_path / "usr/share/help/ko/a/one.page", page.format("Not translated in this manual", korean))
    write(tmp_path / "usr/share/help/C/a/two.page", page.format("A page in English only", english))
    write(tmp_path / "usr/share/gimp/2.0/help/en/x.html", "<p>Draw a line &amp; <b>fill</b>\n the circle</p><p>Too short</p>")
    write(tmp_path / "usr/share/gimp/2.0/help/ko/x.html", "<p>선을 긋고 원을 채웁니다</p><p>너무 짧습니다</p>")
    script = runpy.run_path(str(SCRIPTS / "manual_pairs.py"))
    found = [pair for pair in script["pairs"](tmp_path) if script["is_translated"](*pair)]
    assert found == [
        ("Open all the files.", "모든 파일을 엽니다."),
        ("Then close them all.", "그리고 모두 닫습니다."),
        ("Draw a line & fill the circle", "선을 긋고 원을 채웁니다"),
    ]


def test_pairs_of_catalogues_are_finished_translations(tmp_path):
    def message(english, korean, more=""):
        return f'{more}\nmsgid "{english}"\nmsgstr "{korean}"\n'

    catalogue = [
        message("", "Content-Type: text/plain; charset=UTF-8\\n"),
        message("Open <b>all</b> the files.", "모든 파일을 <b>엽니다</b>."),
        message("Close all of them.", "모두 닫습니다.", "#, fuzzy"),
        message("Not translated in this file", ""),
        message("Too short", "너무 짧습니다"),
    ]
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a/locale/ko/LC_MESSAGES/django.po", "\n".join(catalogue))
        wheel.writestr("a/locale/ko/LC_MESSAGES/django.mo", b"not read: the .po file is there")
        wheel.writestr("a/locale/de/LC_MESSAGES/django.po", "not read")
    script = runpy.run_path(str(SCRIPTS / "catalogue_pairs.py"))
    assert script["pairs"](tmp_path) == {"Open all the files.": "모든 파일을 엽니다 ."}


def test_learning_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"epoch": epoch, "test_loss": 5.0 - epoch, "test_chrf": 9.0 * epoch} for epoch in (1, 2)]
    for run in ("before", "after"):
        write(tmp_path / run / "history.json", json.dumps({"epochs": rows}))
    runs = {run: [str(tmp_path / run)] for run in ("before", "after")}
    runpy.run_path(str(SCRIPTS / "plot_learning.py"))["draw"](str(tmp_path / "a.png"), "title", 4.5, runs)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
