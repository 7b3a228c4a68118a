"""seed_everything(): a seed that it refuses."""

import gluon_mgpu as mgpu
import mxnet as mx
import pytest


@pytest.mark.parametrize("seed", [-1, 2**31, 0.5, True, "0"])
def test_a_wrong_seed_changes_nothing(seed):
    mgpu.seed_everything(1)
    expected = mx.nd.random.uniform(shape=3).asnumpy()
    mgpu.seed_everything(1)
    with pytest.raises(mgpu.errors.TrainerError, match="^seed_everything: got seed="):
        mgpu.seed_everything(seed)
    assert (mx.nd.random.uniform(shape=3).asnumpy() == expected).all()
