"""What MXNet's Python code reads in newer versions of Python and NumPy: it finds it, and nothing stays in NumPy."""

import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.mxnet_import import as_text
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import nd
from mxnet.gluon import nn

from .conftest import assert_house_style

pytestmark = pytest.mark.skipif(is_mxnet2(), reason="MXNet 2 reads other names")
SIX = np.int64(6)


def run(program, tmp_path, *options, **environment):
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, *options, "program.py"]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_no_name_stays_in_numpy(tmp_path):
    """A package may ask hasattr(np, name) for the version of NumPy."""
    program = """
import numpy as np
names = "alltrue bool compat complex float float_ in1d Inf int msort NaN NINF npv object product PZERO round_ str trapz".split()
before = {name: vars(np).get(name) for name in names}
import gluon_mgpu
import mxnet
assert before == {name: vars(np).get(name) for name in names}
"""
    assert run(program, tmp_path, "-W", "error") == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NumPy 1.25 and 1.26, which still have some
def test_former_names_are_there_for_mxnet():
    import mxnet.gluon.contrib.estimator as estimator

    x = mx.np.array([[1.0, 2.0], [3.0, 0.0]])
    assert mx.np.trapz(x).tolist() == [1.5, 1.5]
    assert mx.np.msort(x).tolist() == [[1.0, 0.0], [3.0, 2.0]]
    assert mx.np.in1d(x, mx.np.array([3.0])).tolist() == [False, False, True, False]
    assert not mx.np.alltrue(x) and mx.np.sometrue(x) and mx.np.product(x).item() == 0 and mx.np.round_(x).tolist() == x.tolist()
    assert [mx.np.PINF, mx.np.NINF, mx.np.PZERO, str(mx.np.NaN)] == [np.inf, -np.inf, 0, "nan"]
    assert mx.np.pad(x, ((1, 0), (0, 0)), mode="constant").tolist() == [[0.0, 0.0], [1.0, 2.0], [3.0, 0.0]]
    assert mx.np.full((2,), True).dtype == np.bool_ and x[x > 1].tolist() == [2.0, 3.0]
    handler = estimator.EarlyStoppingHandler(mx.metric.Loss(), mode="min")
    handler.train_begin(None)
    assert handler.best == np.inf


def test_numpy_calls_mxnets_functions():
    """MXNet keeps NumPy's functions as keys: a former name must not take the place of its successor."""
    x = mx.np.array([[1.0, 2.0], [3.0, 0.0]])
    for function in (np.sum, np.prod, np.all, np.any, np.round, np.mean):
        assert isinstance(function(x), mx.np.ndarray), function


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "1.20.0", reason="this NumPy has them")
def test_financial_functions_name_their_package():
    with pytest.raises(NotImplementedError, match="numpy_financial") as caught:
        mx.np.pv(0.1, 12, 100)
    assert_house_style(caught.value)


@pytest.mark.parametrize(
    "value, text",
    [
        ([0, SIX, np.uint8(12)], "[0, 6, 12]"),
        ((np.float32(0.5), np.float64(-1e-8), np.float64("inf")), "(0.5, -1e-08, inf)"),
        ({"a": np.bool_(True)}, "{'a': True}"),
        (np.int64(3), "3"),
        ("np.int64 (6), np.array", "np.int64 (6), np.array"),
        (np.float32, str(np.float32)),
    ],
)
def test_numbers_of_numpy_are_written_as_numbers(value, text):
    assert as_text(value) == text and isinstance(text, str) and isinstance(text, as_text)


def test_numbers_of_numpy_are_arguments(tmp_path):
    """NumPy 2 writes them as np.int64(6) in a list, which MXNet's library refuses."""
    assert [part.shape for part in nd.split_v2(nd.arange(18), (SIX, 2 * SIX))] == [(6,), (6,), (6,)]
    assert mx.sym.reshape(mx.sym.var("x", shape=(SIX, 2)), shape=(np.int64(3), -1)).infer_shape()[1] == [(3, 4)]
    net = nn.Conv2D(np.int64(2), (np.int64(3), np.int64(3)))
    net.initialize()
    net.hybridize()
    assert net(nd.ones((1, 1, 4, 4))).shape == (1, 2, 2, 2)
    (tmp_path / "rows.csv").write_text("1,2\n3,4\n")
    rows = mx.io.CSVIter(data_csv=str(tmp_path / "rows.csv"), data_shape=(np.int64(2),), batch_size=2)
    assert next(rows).data[0].asnumpy().tolist() == [[1, 2], [3, 4]]


def test_records_hold_several_labels_and_pictures(tmp_path):
    """Both call ndarray.tostring, which NumPy 2.3 removed."""
    (tmp_path / "cv2.py").write_text(
        "import numpy\nIMWRITE_JPEG_QUALITY = 1\ndef imencode(kind, image, options):\n    return True, image.reshape(-1)\n"
    )
    program = """
import sys
import gluon_mgpu
import mxnet as mx
import numpy as np
header, image = mx.recordio.unpack(mx.recordio.pack_img(mx.recordio.IRHeader(0, [1.0, 2.0], 7, 0), np.arange(4, dtype="uint8")))
print(header.label.tolist(), image)
"""
    assert run(program, tmp_path) == "[1.0, 2.0] b'\\x00\\x01\\x02\\x03'\n"


@pytest.mark.parametrize("start", ["", "fork", "spawn", "forkserver"])
def test_workers_load_data(start, tmp_path):
    program = f"""
import multiprocessing
import gluon_mgpu
import numpy as np
from mxnet import gluon


def square(x):
    return x * x


if __name__ == "__main__":
    if {start!r}:
        multiprocessing.set_start_method({start!r})
    data = gluon.data.SimpleDataset(np.arange(6, dtype="float32"))
    for options in ({{"thread_pool": True}}, {{}}):
        batches = gluon.data.DataLoader(data.transform(square), 4, num_workers=2, **options)
        print([batch.asnumpy().tolist() for batch in batches])
"""
    assert run(program, tmp_path, "-W", "ignore") == "[[0.0, 1.0, 4.0, 9.0], [16.0, 25.0]]\n" * 2
