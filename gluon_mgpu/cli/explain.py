"""gluon-mgpu explain: what an error message means and what to do. It imports no MXNet, whose import may be what fails."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Optional, Sequence

import click

from ..explain import ENTRIES, Answer, explain_log, explain_message, system_note

_LABELS = {
    "en": ("message", "cause", "what to do", "see", "also close"),
    "ko": ("메시지", "원인", "해결 방법", "참고", "비슷한 항목"),
}
_NOTE = {"en": "note", "ko": "참고 사항"}
_NOTHING = {
    "en": "No entry fits. gluon-mgpu doctor checks this machine; docs/troubleshooting.md lists symptoms.",
    "ko": "맞는 항목이 없습니다. gluon-mgpu doctor로 이 컴퓨터를 점검하고, docs/troubleshooting.md에서 증상을 찾아보세요.",
}
_FILE = {
    "en": "This is a file. To explain a log, run: gluon-mgpu explain - < {}",
    "ko": "파일 이름입니다. 로그의 오류를 설명하려면 다음을 실행하세요: gluon-mgpu explain - < {}",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("message", nargs=-1, required=True)
@click.option("--lang", type=click.Choice(["en", "ko"]), help="Language of the answer; by default that of the locale.")
def explain(message: Sequence[str], lang: Optional[str]) -> None:
    """Explain what an error MESSAGE means and what to do; - reads a log from standard input.

    MESSAGE may also be the name of an entry. It works offline. The exit status is 1 if no entry fits.
    """
    text = " ".join(message)
    named = [Answer(entry, ()) for entry in ENTRIES if entry.name == text]
    log = sys.stdin.buffer.read().decode("utf-8", "replace") if text == "-" else None
    found = named or (explain_message(text) if log is None else explain_log(log))
    language = lang or _language()
    for number, answer in enumerate(found):
        click.echo(("\n" if number else "") + _as_text(answer if len(found) == 1 else answer._replace(others=()), language))
        system = None if number else system_note(text if log is None else log, answer.entry)
        if system:
            click.echo(f"  {_NOTE[language]}: {system.note_ko if language == 'ko' else system.note}")
    if not found:
        click.echo(_FILE[language].format(shlex.quote(text)) if os.path.isfile(text) else _NOTHING[language], err=True)
        sys.exit(1)


def _language() -> str:
    locale = next((os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), "")
    return "ko" if locale.startswith("ko") else "en"


def _as_text(answer: Answer, language: str) -> str:
    message, cause, fix, see, close = _LABELS[language]
    entry, others = answer.entry, answer.others
    shown = (answer.message or entry.messages[0]).replace("¶", "…")  # which may stand for line breaks
    lines = [
        entry.name,
        f"  {message}: {shown}" + (f" ({entry.source})" if entry.source and shown == entry.messages[0] else ""),
        f"  {cause}: {entry.cause_ko if language == 'ko' else entry.cause}",
        f"  {fix}: {entry.fix_ko if language == 'ko' else entry.fix}",
        f"  {see}: docs/{entry.link}",
    ]
    return "\n".join(lines + ([f"  {close}: {', '.join(others)}"] if others else []))
