"""Contract: modules import only from lines above them in the list of docs/architecture.md, and the list is the tree."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gluon_mgpu"
PAGE = ROOT / "docs" / "architecture.md"
TREE = re.search(r"^gluon_mgpu/\n((?:  \S.*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE).group(1)
ROOMS = [re.match(r"  (\w+)(?:\.py|/) +\S", line).group(1) for line in TREE.splitlines()]


def imported_rooms(path):
    """The rooms that a file imports from, at any depth of the code."""
    package = ("gluon_mgpu", *path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "gluon_mgpu" and len(name) > 1 and name[1] in ROOMS}
    return found


def test_the_list_is_the_tree():
    there = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(ROOMS) == there - {"__init__", "__main__"}
    assert len(set(ROOMS)) == len(ROOMS)


def test_imports_go_up():
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].replace(".py", "")
        if room in ROOMS:
            below = [other for other in imported_rooms(path) if ROOMS.index(other) > ROOMS.index(room)]
            assert not below, f"{path.relative_to(ROOT)} imports from {below}, which stand below {room}"


def test_the_check_sees_imports():
    assert {"errors", "nested", "trainer", "sharding"} <= imported_rooms(PACKAGE / "step.py")
    assert {"fit", "devices", "data", "models"} <= imported_rooms(PACKAGE / "cli" / "train.py")


def test_inits_only_re_export():
    for path in PACKAGE.glob("*/__init__.py"):
        kinds = {type(node) for node in ast.parse(path.read_text(encoding="utf-8")).body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, path


def test_every_module_says_what_it_is_for():
    for path in PACKAGE.rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring and len(docstring.splitlines()[0]) < 130, path


def test_optional_packages_are_imported_where_used():
    """`import gluon_mgpu` must work with the extra `cpu` alone."""
    optional = {"matplotlib", "sklearn", "scipy", "d2l", "threadpoolctl", "torch", "gluoncv", "pytest", "IPython"}
    optional |= {"sentencepiece", "sacrebleu", "greenlet", "psutil", "pynvml", "horovod"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not optional & {module.split(".")[0] for module in modules}, path
