# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.runtime.linear_kv_cache import LinearKVCache


@pytest.fixture
def cache() -> LinearKVCache:
    return LinearKVCache(
        CpuDevice(), layers=2, max_batch_size=3, kv_heads=2, capacity=16, head_dim=4, dtype=np.float32
    )


def test_lengths_are_the_same_on_host_and_device(cache):
    cache.reset_for_new_sequences([0, 5], [0, -2])
    cache.commit_sequence_length(np.array([4, 0]))
    assert cache.active_batch_size == 2
    assert cache.lengths.tolist() == cache.device_lengths.array.tolist() == [4, 5]
    assert cache.device_rope_deltas.array.tolist() == [0, -2]


def test_what_an_engine_reads_and_writes_is_the_same_memory(cache):
    cache.reset_for_new_sequences([0, 0], [0, 0])
    bindings = cache.bindings()
    assert set(bindings) == {
        f"{name}_{layer}"
        for name in ("key_cache", "value_cache", "present_key", "present_value")
        for layer in (0, 1)
    }
    assert bindings["key_cache_1"].pointer == bindings["present_key_1"].pointer
    assert bindings["key_cache_1"].shape == (2, 2, 16, 4)
    assert len({tensor.pointer for tensor in bindings.values()}) == 4


def test_a_sequence_is_a_window_on_its_rows(cache):
    cache.reset_for_new_sequences([3, 7, 9], [0, -1, -2])
    sequence = cache.sequence(1)
    cache.bindings()["value_cache_1"].array[1, 0, 2] = 5.0
    assert sequence.values[1].array[0, 0, 2].tolist() == [5.0] * 4
    assert sequence.values[0].shape == (1, 2, 16, 4)
    assert (sequence.length.array.tolist(), sequence.rope_delta.array.tolist()) == ([7], [-1])


def test_a_smaller_batch_goes_on_with_the_first_sequences(cache):
    cache.reset_for_new_sequences([3, 7, 9], [0, 0, 0])
    cache.set_active_batch_size(1)
    cache.commit_sequence_length(np.array([1]))
    assert cache.lengths.tolist() == [4]
    assert cache.sequence(2).length.array.tolist() == [9]


def test_more_rows_than_there_are_is_an_error_that_names_both(cache):
    cache.reset_for_new_sequences([16], [0])
    with pytest.raises(ValueError, match=r"\[17\] tokens exceed the capacity 16"):
        cache.commit_sequence_length(np.array([1]))


@pytest.mark.parametrize("batch", [0, 4])
def test_a_batch_that_does_not_fit_is_an_error(cache, batch):
    with pytest.raises(ValueError, match=f"{batch} sequences, the cache holds 1 to 3"):
        cache.reset_for_new_sequences([0] * batch, [0] * batch)
    with pytest.raises(ValueError, match=f"from 1 to 3, got {batch}"):
        cache.set_active_batch_size(batch)


def test_clearing_leaves_zeros_everywhere(cache):
    cache.reset_for_new_sequences([0, 0, 0], [0, 0, 0])
    for tensor in cache.bindings().values():
        tensor.array[:] = np.nan
    cache.clear()
    assert all(not tensor.array.any() for tensor in cache.bindings().values())
