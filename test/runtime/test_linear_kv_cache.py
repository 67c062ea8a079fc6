# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from fixtures.on_device import edited, open_rows, put


@pytest.fixture
def cache(device, kernels) -> LinearKVCache:
    shape = {"layers": 2, "max_batch_size": 3, "kv_heads": 2, "capacity": 16, "head_dim": 4}
    return LinearKVCache(device, kernels, **shape, dtype=np.dtype(np.float32))


def test_a_commit_lengthens_the_rows_of_a_step(device, cache):
    open_rows(device, cache, [(0, 0), (5, -2), (3, 0)])
    cache.commit(put(device, np.array([4, 0])))
    assert device.download(cache.lengths(range(3))).tolist() == [4, 5, 3]
    assert device.download(cache.rope_deltas(range(3))).tolist() == [0, -2, 0]


def test_a_commit_of_some_rows_leaves_the_others(device, cache):
    open_rows(device, cache, [(1, 0), (2, 0), (3, 0)])
    cache.commit_rows(range(1, 3), put(device, np.array([10, 10])))
    assert device.download(cache.lengths(range(3))).tolist() == [1, 12, 13]


def test_cache_inputs_and_outputs_share_memory(cache):
    bindings = cache.bindings(range(2))
    assert set(bindings) == {
        f"{name}_{layer}"
        for name in ("key_cache", "value_cache", "present_key", "present_value")
        for layer in (0, 1)
    }
    assert bindings["key_cache_1"].pointer == bindings["present_key_1"].pointer
    assert bindings["key_cache_1"].shape == (2, 2, 16, 4)
    assert len({tensor.pointer for tensor in bindings.values()}) == 4


def test_bindings_of_later_rows_begin_where_these_rows_are(cache):
    row_bytes = 2 * 16 * 4 * 4
    for name, tensor in cache.bindings(range(2, 3)).items():
        assert tensor.shape == (1, 2, 16, 4)
        assert tensor.pointer == cache.bindings(range(3))[name].pointer + 2 * row_bytes


def test_a_sequence_is_a_window_on_its_rows(device, cache):
    open_rows(device, cache, [(3, 0), (7, -1), (9, -2)])
    sequence = cache.sequence(1)
    with edited(device, cache.bindings(range(3))["value_cache_1"]) as rows:
        rows[1, 0, 2] = 5.0
    assert device.download(sequence.values[1])[0, 0, 2].tolist() == [5.0] * 4
    assert sequence.values[0].shape == (1, 2, 16, 4)
    assert device.download(sequence.length).tolist() == [7]
    assert device.download(sequence.rope_delta).tolist() == [-1]


def test_a_row_moves_with_its_keys_values_and_length(device, cache):
    open_rows(device, cache, [(3, 0), (7, -1), (9, -2)])
    for name, tensor in cache.bindings(range(3)).items():
        number = 100 * int(name[-1]) * (1 if "key" in name else -1)
        with edited(device, tensor) as rows:
            rows[...] = number + np.arange(3)[:, None, None, None]
    cache.move(2, 0)
    moved = cache.sequence(0)
    assert device.download(moved.length).tolist() == [9]
    assert device.download(moved.rope_delta).tolist() == [-2]
    for layer in (0, 1):
        for tensors, sign in ((moved.keys, 1), (moved.values, -1)):
            committed = device.download(tensors[layer])[0, :, :9]
            assert set(committed.ravel().tolist()) == {100 * layer * sign + 2}
    assert cache.host_length(0) == 9


def test_a_closed_row_is_empty(device, cache):
    open_rows(device, cache, [(3, 0), (7, -1)])
    cache.close(1)
    assert device.download(cache.lengths(range(2))).tolist() == [3, 0]


def test_clearing_leaves_zeros_everywhere(device, cache):
    for tensor in cache.bindings(range(3)).values():
        device.upload(tensor, np.full(tensor.shape, np.nan, np.float32))
    cache.clear()
    assert all(not device.download(tensor).any() for tensor in cache.bindings(range(3)).values())
