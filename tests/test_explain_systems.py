"""Answers for other systems than Linux on x86-64."""

import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.main import main
from gluon_mgpu.explain import systems

NO_MXNET = "ModuleNotFoundError: No module named 'mxnet'"


def note(*lines, lang="en"):
    """The line that follows the answer, "" if there is none."""
    label = {"en": "note: ", "ko": "참고 사항: "}[lang]
    result = CliRunner().invoke(main, ["explain", "--lang", lang, "-"], input="\n".join(lines), prog_name="gluon-mgpu")
    assert result.exit_code == 0
    return "".join(line.split(label, 1)[1] for line in result.output.splitlines() if line.startswith(f"  {label}"))


@pytest.mark.parametrize(
    "line, names",
    [
        (r'  File "C:\Users\me\train.py", line 1, in <module>', "WSL 2"),
        (r"  File c:/venv/Lib/site-packages/mxnet/__init__.py", "WSL 2"),
        ('  File "/Users/me/train.py", line 1, in <module>', "Intel Macs"),
        ("Linux graviton 5.10.0 #1 SMP aarch64 GNU/Linux", "Arm Performance Libraries"),
    ],
)
def test_an_answer_for_linux_says_what_does_not_work_on_another_system(line, names):
    assert names in note(line, NO_MXNET)
    assert note(line, NO_MXNET, lang="ko")


@pytest.mark.parametrize(
    "lines",
    [
        ('  File "/home/me/train.py", line 1, in <module>', NO_MXNET),
        ("https://example.org/c:/Users", NO_MXNET),
        ('  File "/c/Users/me/train.py"', NO_MXNET),
        (r'  File "C:\me\train.py"', "[WinError 126] The specified module could not be found"),  # names Windows itself
        (r'  File "C:\me\train.py"', "Check failed: dshape[1] (3 vs. 4)"),  # nothing to install
    ],
)
def test_other_answers_have_no_note(lines):
    assert not note(*lines)


def test_the_system_of_this_machine_counts(monkeypatch):
    monkeypatch.setattr(systems, "_HERE", 1)
    assert "On macOS" in note(NO_MXNET)
    assert "On Windows" in note(r"C:\train.py", NO_MXNET)
