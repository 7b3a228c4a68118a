"""Contract: rooms import only from rooms above them in docs/architecture.md, and modules form no cycle."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gluon_mgpu"
PAGE = ROOT / "docs" / "architecture.md"
CELLS = re.findall(r"^\| (`.*?`) \| .*\?", PAGE.read_text(encoding="utf-8").split("## Find the file")[0], re.MULTILINE)
ROOMS = [name for cell in CELLS for name in re.findall(r"`(\w+)/?`", cell)]


@functools.lru_cache(maxsize=None)
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=None)
def imports_of(path):
    """The import statements of a file, at any depth of its code."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported_modules(path):
    """The parts of the names, without the package's own, that a file imports from the package."""
    package = ("gluon_mgpu", *path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            names = [module, *((*module, alias.name) for alias in node.names)]
        else:
            names = [tuple(alias.name.split(".")) for alias in node.names]
        found |= {name[1:] for name in names if name[0] == "gluon_mgpu" and len(name) > 1}
    return found


def imported_rooms(path):
    return {name[0] for name in imported_modules(path)} & set(ROOMS)


def test_the_list_is_the_tree():
    there = {path.relative_to(PACKAGE).parts[0].replace(".py", "") for path in PACKAGE.rglob("*.py")}
    assert sorted(ROOMS) == sorted(name for name in there if not name.startswith("__"))


def test_rooms_import_from_rooms_above():
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].replace(".py", "")
        if room in ROOMS:
            below = [other for other in imported_rooms(path) if ROOMS.index(other) > ROOMS.index(room)]
            assert not below, f"{path.relative_to(ROOT)} imports from {below}, which stand below {room}"


@pytest.mark.parametrize("room", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_modules_of_a_room_form_no_cycle(room):
    modules = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in (PACKAGE / room).rglob("*.py")}
    needs = {name: imported_modules(path) & set(modules) - {name} for name, path in modules.items()}
    while needs:
        done = {name for name in needs if not needs[name] & set(needs)}
        assert done, f"modules of {room} that import each other: {sorted('/'.join(name) for name in needs)}"
        needs = {name: those for name, those in needs.items() if name not in done}


def test_the_check_sees_imports():
    assert {"nested", "trainer", "distributed"} <= imported_rooms(PACKAGE / "data_parallel" / "step.py")
    assert {"loop", "data", "data_parallel", "models"} <= imported_rooms(PACKAGE / "cli" / "train_resnet18.py")
    assert ("data_parallel", "sharding") in imported_modules(PACKAGE / "data_parallel" / "step.py")


def test_inits_only_re_export():
    for path in PACKAGE.glob("**/__init__.py"):
        kinds = {type(node) for node in parsed(path).body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, path


def test_every_module_says_what_it_is_for():
    for path in PACKAGE.rglob("*.py"):
        docstring = ast.get_docstring(parsed(path))
        assert docstring and len(docstring.splitlines()[0]) < 130, path


def test_optional_packages_are_imported_where_used():
    """`import gluon_mgpu` must work with the extra `cpu` alone."""
    optional = {"matplotlib", "sklearn", "scipy", "d2l", "threadpoolctl", "torch", "gluoncv", "pytest", "IPython", "ray"}
    optional |= {"sentencepiece", "sacrebleu", "greenlet", "psutil", "pynvml", "horovod", "tensorboardX", "onnx", "onnxruntime"}
    for path in PACKAGE.rglob("*.py"):
        for node in imports_of(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not optional & {module.split(".")[0] for module in modules}, path
