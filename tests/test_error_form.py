"""Every error in the source reads `<operation>: got <value>; expected <condition>. <What to do>.`"""

import ast
import re
from pathlib import Path

import gluon_mgpu as mgpu
from gluon_mgpu import errors

FORM = re.compile(r"[\w. \-\[\]()'@…]+: got .+; expected .+[.:…]( .+)?", re.DOTALL)
COMMAND = re.compile(r"got .+; expected .+\.", re.DOTALL)  # click writes the command before it
PACKAGE = Path(mgpu.__file__).parent
# A cause that another error names, the news of a device, and words that depend on what was found.
REASONS = {"NotCompilableError", "NoMemoryError", "StepError", "LostError", "HandshakeError"}
OTHERS = {"Seq2Seq: got …; ….", "Seq2Seq: got arrays of shapes …, …, …; ….", "load_states: got …. Install a newer gluon_mgpu."}
OTHERS |= {"launch: got …", "launch: …. Node 0 rejected this node.", "… …"}


def text_of(node):
    """What a literal or an f-string says, with … in the place of values; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        sides = text_of(node.left), text_of(node.right)
        return None if sides == (None, None) else "".join(side or "…" for side in sides)
    return None


def raised_in(path):
    """The name and the text of each exception that a file raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            callee = node.exc.func
            name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
            yield name, text_of(node.exc.args[0])


def test_every_error_in_the_source_has_the_form():
    found = [(path.name, *one) for path in sorted(PACKAGE.rglob("*.py")) for one in raised_in(path)]
    ours = [one for one in found if hasattr(errors, one[1]) and one[1] not in REASONS and one[2] not in (None, *OTHERS)]
    assert len(ours) > 250
    assert [one for one in ours if not FORM.fullmatch(one[2])] == []
    commands = [one for one in found if one[1] in ("BadParameter", "UsageError") and one[2] not in (None, "got …")]
    assert commands
    assert [one for one in commands if not COMMAND.fullmatch(one[2])] == []
