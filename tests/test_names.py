"""What a newcomer reads first: help(gluon_mgpu), the public names and their arguments."""

import inspect
import pydoc
import re
from dataclasses import is_dataclass

import gluon_mgpu as mgpu
from mxnet import gluon

OF_GLUON = {  # whose arguments these have, in their order
    "Trainer": gluon.Trainer,
    "SyncBatchNorm": gluon.nn.BatchNorm,
    "Pipeline.initialize": gluon.Block.initialize,
    "split_and_load": gluon.utils.split_and_load,
    "split_data": gluon.utils.split_data,
    "DataParallelModel": None,  # gluoncv.utils.parallel
    "DataParallelCriterion": None,
    "Seq2Seq.compute": None,  # hybrid_forward: F, then each input and parameter
}
OF_D2L = {"split_batch", "fit", "train_batch"}  # the last two: the arguments of train_ch13 and train_batch


def public():
    """Return the public functions, methods and constructors by their names, except constructors of dataclasses."""
    found = {}
    rooms = [getattr(mgpu, name) for name in mgpu.__all__ if inspect.ismodule(getattr(mgpu, name))]
    for room in [mgpu, *rooms]:
        for name in getattr(room, "__all__", vars(room)):
            thing = getattr(room, name)
            if name.startswith("_") or not getattr(thing, "__module__", "").startswith("gluon_mgpu"):
                continue
            if inspect.isfunction(thing):
                found[name] = thing
            elif inspect.isclass(thing) and not issubclass(thing, Exception):
                if "__init__" in vars(thing) and not is_dataclass(thing):
                    found[name] = thing
                methods = (method for method, _ in inspect.getmembers(thing, inspect.isroutine) if method in vars(thing))
                found.update({f"{name}.{method}": getattr(thing, method) for method in methods if not method.startswith("_")})
    return found


def arguments(call, *, positional):
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    kinds |= set() if positional else {inspect.Parameter.KEYWORD_ONLY}
    names = [parameter.name for parameter in inspect.signature(call).parameters.values() if parameter.kind in kinds]
    return [name for name in names if name != "self"]


def test_help_begins_with_the_public_names():
    """It began with a list of internal modules."""
    shown = pydoc.plain(pydoc.render_doc(mgpu))
    first = shown[: shown.index("PACKAGE CONTENTS")]
    assert first.index("use_devices") < first.index("fit") < first.index("Pipeline")
    assert set(mgpu.__all__) <= set(re.findall(r"\w+", mgpu.__doc__))


def test_faces_agree():
    """save_checkpoint(net, folder) and export(net, path) had other orders, devices four names, and export four positions."""
    for name, call in public().items():
        positional = arguments(call, positional=True)
        assert "net" not in positional[1:], name
        if name in OF_GLUON:
            known = OF_GLUON[name]
            assert known is None or positional == arguments(known, positional=True), name
        elif name not in OF_D2L:
            assert len(positional) <= 3, name
            assert not {"devices", "ctx_list", "contexts"} & set(arguments(call, positional=False)), name
