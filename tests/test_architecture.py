"""Contract: rooms import from rooms above them only, modules form no cycle, and one room knows MXNet's inside."""

import ast
import functools
import re
from pathlib import Path

import mxnet as mx
import pytest
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import gluon
from mxnet.gluon import nn

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


def test_the_path_of_a_gradient_names_what_there_is():
    path = PAGE.read_text(encoding="utf-8").split("## The rooms")[0]
    classes = {node.name: node for file in PACKAGE.rglob("*.py") for node in ast.walk(parsed(file)) if is_class(node)}
    named = re.findall(r"`([A-Z]\w+)\.(\w+)", path)
    assert len(named) > 20
    for name, method in named:
        assert method in {node.name for node in classes[name].body if isinstance(node, ast.FunctionDef)}, f"{name}.{method}"


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


INTERNALS = "mxnet_internals"
OTHER_LIBRARIES = {  # modules with `ctypes` for other libraries than MXNet's
    "distributed/launcher/guard.py": "the C library: signals at the exit of a parent",
    "runtime/cuda_libraries.py": "the libraries that MXNet's needs, before its import",
    "runtime/environment.py": "the C library: its allocator",
    "runtime/openmp_threads.py": "OpenMP: numbers of threads",
}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "get", "pop"}


def is_private(name):
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


@functools.lru_cache(maxsize=None)
def private_attributes():
    """The private attributes of MXNet's objects, by the name of the class."""
    symbol, net = mx.sym.var("x"), nn.Dense(1, in_units=1)
    net.initialize()
    dataset = gluon.data.ArrayDataset([1, 2])
    blocks = [gluon.Block(), gluon.HybridBlock(), net, nn.BatchNorm(), nn.Dropout(0.5), nn.Sequential(), gluon.rnn.LSTM(1)]
    loader = [dataset, gluon.data.DataLoader(dataset, 1), gluon.data.BatchSampler(gluon.data.SequentialSampler(2), 1)]
    arrays = [mx.nd.zeros(1), mx.np.zeros(1), symbol, symbol.as_np_ndarray(), mx.cpu(), mx.io.NDArrayIter(mx.nd.zeros(2))]
    optimizers = [mx.optimizer.SGD(), mx.optimizer.get_updater(mx.optimizer.SGD()), mx.kv.create("local")]
    others = [gluon.loss.SoftmaxCELoss(), gluon.Trainer(net.collect_params(), "sgd")]
    executor = (symbol * 2).bind(mx.cpu(), {"x": mx.nd.zeros(1)})
    things = [*blocks, net.weight, *loader, *arrays, *optimizers, *others, executor]
    return {type(thing).__name__: set(filter(is_private, dir(thing))) for thing in things}


def private_attributes_of(classes=None):
    """Those of classes, None for all; of one that is not known, all of them."""
    known, every = private_attributes(), set().union(*private_attributes().values())
    return every if classes is None else set().union(*(known.get(name, every) for name in classes))


def called(node):
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def dotted(node):
    """The names of an expression such as `mx.nd.array`, "?" for what is none."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return getattr(node, "id", "?")


def foreign_bases(trees):
    """For each class, the names of the classes outside of the package that it comes from."""
    bases = {node.name: set(map(dotted, node.bases)) for tree in trees for node in ast.walk(tree) if is_class(node)}

    def foreign(name):
        return set().union(*(foreign(one) if one in bases and one != name else {one.split(".")[-1]} for one in bases[name]))

    return {name: foreign(name) for name in bases}


def is_class(node):
    return isinstance(node, ast.ClassDef)


def private_uses(tree, foreign, has_other_library=False):
    """Yield what a module writes that only MXNet's own modules should know; `foreign`: of `foreign_bases`."""
    inside = {}
    for one in filter(is_class, ast.walk(tree)):
        inside.update(dict.fromkeys(ast.walk(one), private_attributes_of(foreign[one.name])))
    private = private_attributes_of()
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    of_mxnet = {"mx", "mxnet"}
    for node in imports:
        module = "" if isinstance(node, ast.Import) or node.level else node.module
        names = [alias.name for alias in node.names]
        if ("ctypes" in (module, *names) and not has_other_library) or "mxnet.base" in names:
            yield f"line {node.lineno}: import {', '.join(names)}"
        if module.split(".")[0] == "mxnet":
            of_mxnet |= {alias.asname or alias.name for alias in node.names}
            if any(map(is_private, (*module.split("."), *names))) or module == "mxnet.base" or "base" in names:
                yield f"line {node.lineno}: from {module} import {', '.join(names)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = dotted(node)
            known = inside.get(node, private) if text == f"self.{node.attr}" else private
            of_module = text.split(".")[0] in of_mxnet and (is_private(node.attr) or node.attr == "base")
            if of_module or node.attr == "_LIB" or node.attr in known:
                yield f"line {node.lineno}: {text}"
        if isinstance(node, ast.FunctionDef) and node.name in inside.get(node, ()):
            yield f"line {node.lineno}: def {node.name}"
        texts = node.args if called(node) in BY_NAME else ()
        if isinstance(node, ast.Compare) and called(node.comparators[0]) == "vars":
            texts = [node.left]
        for text in texts:
            if isinstance(text, ast.Constant) and text.value in private:
                yield f"line {text.lineno}: {text.value!r}"


@pytest.mark.skipif(is_mxnet2(), reason="reads the private names of the objects of MXNet 1.9")
def test_one_room_knows_mxnets_inside():
    paths = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != INTERNALS]
    foreign = foreign_bases(map(parsed, PACKAGE.rglob("*.py")))
    for path in paths:
        name = str(path.relative_to(PACKAGE))
        found = list(private_uses(parsed(path), foreign, name in OTHER_LIBRARIES))
        assert not found, f"{name} knows MXNet's inside: {found}; move it to {INTERNALS}/, as a function that says why"


@pytest.mark.skipif(is_mxnet2(), reason="reads the private names of the objects of MXNet 1.9")
@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("param._data, param._deferred_init, block._active, array._slice(0, 1), loss._axis", 5),
        ("net._collect_params_with_prefix(), block._get_graph(x), block._cached_op, array._sync_copyfrom(x)", 4),
        ("getattr(loader, '_batch_sampler', None), attrgetter('_data'), vars(net).get('_cached_graph')", 3),
        ("'_get_graph' in vars(block)", 1),
        ("from mxnet.gluon.block import _flatten", 1),
        ("from mxnet.gluon import block as of_gluon\nof_gluon._flatten", 1),
        ("from mxnet._deferred_compute import is_deferred_compute", 1),
        ("from mxnet.base import check_call", 1),
        ("mx.nd._internal, mx.sym.np._Symbol, mx.Context._default_ctx, mx.base.check_call", 4),
        ("import ctypes", 1),
        ("import mxnet.base", 1),
        ("class Net(gluon.HybridBlock):\n    def _get_graph(self, x): return x", 1),
        ("class Layer(nn.Dropout):\n    def rate(self): return self._rate", 1),
        ("class Layer(Other):\n    def first(self): return self._children\nclass Other(gluon.Block): pass", 1),
        ("class Net(gluon.Block):\n    def rate(self): return self._rate", 0),
        ("class Ours:\n    def rate(self): return self._rate + self._data", 0),
        ("class Ours(Other):\n    def rate(self): return self._rate\nclass Other: pass", 0),
        ("param.data(), net.collect_params(), {'_zeros': 1}, name.endswith('_data'), getattr(loss, 'num_units')", 0),
    ],
)
def test_the_check_sees_private_names(source, count):
    tree = ast.parse(source)
    assert len(list(private_uses(tree, foreign_bases([tree])))) == count
