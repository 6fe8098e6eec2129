import numpy as np

from mcompile.dtypes import DType, TensorType
from mcompile.feeds import random_feeds
from mcompile.runtime.plan import Signature


def signature(name, dtype, *shape):
    return Signature(name, TensorType(shape, dtype), shape)


def test_feeds_depend_on_the_seed_alone():
    inputs = [signature("x", DType.FLOAT32, 3, 4), signature("b", DType.BOOL, 5)]
    first, second, third = (random_feeds(inputs, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first["x"], second["x"])
    assert not np.array_equal(first["x"], third["x"])
    assert (first["x"].dtype, first["b"].dtype) == (np.float32, np.bool_)


def test_table_indices_stay_in_range_and_other_integers_are_ones():
    inputs = [
        signature("ids", DType.INT64, 1000),
        signature("kinds", DType.INT64, 50),
        signature("mask", DType.INT64, 7),
    ]
    feeds = random_feeds(inputs, 0, {"ids": 30_000, "kinds": 2})
    assert 50 < feeds["ids"].max() < 100
    assert set(feeds["kinds"]) == {0, 1}
    assert set(feeds["mask"]) == {1}
