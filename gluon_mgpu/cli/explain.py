"""gluon-mgpu explain: what an error message means and what to do. It imports no MXNet, whose import may be what fails."""

from __future__ import annotations

import os
import sys
from typing import Optional, Sequence

import click

from ..known_errors import Entry, explain_message, last_error

_WORDS = {"en": ("why", "what to do", "more"), "ko": ("원인", "할 일", "더 보기")}
_NOTHING = {
    "en": """No entry for: {}
1. Search for this line, without names and numbers of your own, at https://github.com/apache/mxnet/issues
2. Check this machine: gluon-mgpu doctor
3. Look the symptom up in docs/troubleshooting.md
4. Ask with the whole traceback, not only its last line, where the library of its last frame is developed.""",
    "ko": """해당 항목이 없습니다: {}
1. 직접 정한 이름과 숫자를 뺀 이 줄을 https://github.com/apache/mxnet/issues 에서 검색하세요.
2. gluon-mgpu doctor로 이 컴퓨터를 점검하세요.
3. docs/ko/troubleshooting.md에서 증상을 찾아보세요.
4. 마지막 줄만이 아니라 트레이스백 전체를 들어, 마지막 프레임의 라이브러리를 개발하는 곳에 문의하세요.""",
}
_SHOWN = 200  # letters of a message


@click.command()
@click.argument("message", nargs=-1, metavar="[MESSAGE...]")
@click.option("--language", type=click.Choice(["en", "ko"]), help="Language of the answer; by default that of the locale.")
def explain(message: Sequence[str], language: Optional[str]) -> None:
    """Explain what an error MESSAGE means and what to do.

    MESSAGE may also be the name of an entry, or -: a log on standard input, the last error first. The exit status is 1 if no
    entry fits.

    \b
    gluon-mgpu explain "Parameter 'conv0_weight' was not initialized on context cpu(0)"
    gluon-mgpu explain - < train.log
    """
    language = language or _language()
    if not message:
        raise click.UsageError("got no MESSAGE; expected an error message. Quote it, or pass - and the log on standard input.")
    text = " ".join(message)
    if text == "-":
        text = sys.stdin.buffer.read().decode("utf-8", "replace") if sys.stdin else ""  # which a shell's <&- leaves
    found = explain_message(text)
    if not found:
        click.echo(_NOTHING[language].format(last_error(text)[:_SHOWN]), err=True)
        sys.exit(1)
    click.echo("\n\n".join(_as_text(entry, language) for entry in found))


def _language() -> str:
    locale = next((os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), "")
    return "ko" if locale.startswith("ko") else "en"


def _as_text(entry: Entry, language: str) -> str:
    why, todo, more = _WORDS[language]
    cause, remedies = (entry.why_ko, entry.todo_ko) if language == "ko" else (entry.why, entry.todo)
    steps = [f"  {number}. {remedy}" for number, remedy in enumerate(remedies, 1)]
    page = entry.see if entry.see.startswith("https:") else f"docs/{entry.see}"
    return "\n".join([entry.name, f"{why}: {cause}", f"{todo}:", *steps, f"{more}: {page}"])
