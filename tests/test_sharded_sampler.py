"""Sampling over processes: every example once, as many batches in each process, the same batches on any number of them."""

import pytest
from gluon_mgpu.data import ShardedSampler
from gluon_mgpu.distributed.process import Process
from gluon_mgpu.errors import DataError
from hypothesis import given
from hypothesis import strategies as st


def samplers(num_processes, *arguments, **options):
    made = [Process(rank, num_processes, rank, num_processes, 0, 1, 0) for rank in range(num_processes)]
    return [ShardedSampler(*arguments, process=one, **options) for one in made]


def test_parts_are_these():
    first, second = samplers(2, 10, 4, shuffle=False)
    assert list(first) == [[0, 1], [4, 5], [8]]
    assert list(second) == [[2, 3], [6, 7], [9]]


def test_a_last_batch_that_is_too_small_for_all_joins_the_one_before():
    parts = [list(one) for one in samplers(3, 14, 4, shuffle=False)]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2], [6], [10, 11]], [[3], [7], [12, 13]]]


@given(st.integers(1, 6), st.integers(0, 60), st.integers(0, 20), st.booleans(), st.integers(0, 3))
def test_every_example_comes_once_and_all_have_as_many_batches(num_processes, more, larger, shuffle, seed):
    size, batch_size = num_processes + more, num_processes + larger
    everyone = samplers(num_processes, size, batch_size, shuffle=shuffle, seed=seed)
    (alone,) = samplers(1, size, batch_size, shuffle=shuffle, seed=seed)
    for _ in range(2):
        passes = [list(one) for one in everyone]
        assert {len(one) for one in passes} == {len(everyone[0])}
        assert all(len(part) >= 1 for one in passes for part in one)
        whole = [[index for part in batch for index in part] for batch in zip(*passes)]
        assert sorted(index for batch in whole for index in batch) == list(range(size))
        assert [index for batch in whole for index in batch] == [index for batch in alone for index in batch]
        for batch in zip(*passes):
            sizes = [len(part) for part in batch]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "arguments, told",
    [((1, 4), "num_examples=1;"), ((9, 1), "batch_size=1;"), ((9, True), "batch_size=True"), ((9, 2.0), "batch_size=2.0")],
)
def test_what_leaves_a_process_without_examples_is_refused(arguments, told):
    with pytest.raises(DataError, match=told):
        samplers(2, *arguments)
