# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from fixtures.on_device import edited


@pytest.fixture
def cache(device, kernels) -> LinearKVCache:
    shape = {"layers": 2, "max_batch_size": 3, "kv_heads": 2, "capacity": 16, "head_dim": 4}
    return LinearKVCache(device, kernels, **shape, dtype=np.float32)


def test_lengths_are_the_same_on_host_and_device(device, cache):
    cache.reset_for_new_sequences([0, 5], [0, -2])
    cache.commit_sequence_length(np.array([4, 0]))
    assert cache.active_batch_size == 2
    assert cache.lengths.tolist() == device.download(cache.device_lengths).tolist() == [4, 5]
    assert device.download(cache.device_rope_deltas).tolist() == [0, -2]


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


def test_a_sequence_is_a_window_on_its_rows(device, cache):
    cache.reset_for_new_sequences([3, 7, 9], [0, -1, -2])
    sequence = cache.sequence(1)
    with edited(device, cache.bindings()["value_cache_1"]) as rows:
        rows[1, 0, 2] = 5.0
    assert device.download(sequence.values[1])[0, 0, 2].tolist() == [5.0] * 4
    assert sequence.values[0].shape == (1, 2, 16, 4)
    assert device.download(sequence.length).tolist() == [7]
    assert device.download(sequence.rope_delta).tolist() == [-1]


def mark(device, cache) -> None:
    """Fill every sequence's rows with a number of its own: its place, and the layer's in the hundreds."""
    for layer in (0, 1):
        for name, sign in (("key_cache", 1), ("value_cache", -1)):
            with edited(device, cache.bindings()[f"{name}_{layer}"]) as rows:
                for place in range(cache.active_batch_size):
                    rows[place] = sign * (100 * layer + place)


def marks(device, cache, place) -> set[float]:
    """The numbers in the committed rows of a sequence."""
    sequence = cache.sequence(place)
    (length,) = device.download(sequence.length)
    rows = [device.download(tensor)[0, :, :length] for tensor in (*sequence.keys, *sequence.values)]
    return {float(value) for array in rows for value in array.ravel()}


def test_when_a_sequence_ends_those_after_it_move_up(device, cache):
    cache.reset_for_new_sequences([3, 7, 9], [0, -1, -2])
    mark(device, cache)
    cache.evict(0)
    assert cache.lengths.tolist() == device.download(cache.device_lengths).tolist() == [7, 9]
    assert device.download(cache.device_rope_deltas).tolist() == [-1, -2]
    assert marks(device, cache, 0) == {1, 101, -1, -101}
    assert marks(device, cache, 1) == {2, 102, -2, -102}


def test_a_sequence_that_has_ended_can_be_read_while_the_others_go_on(device, cache):
    cache.reset_for_new_sequences([9, 7, 3], [-2, -1, 0])
    mark(device, cache)
    for index, remaining in ((1, 2), (0, 1)):
        cache.evict(index)
        cache.commit_sequence_length(np.ones(remaining, np.int64))
    cache.evict(0)
    for place, (length, delta, number) in enumerate([(5, 0, 2), (10, -2, 0), (7, -1, 1)]):
        assert device.download(cache.sequence(place).length).tolist() == [length]
        assert device.download(cache.sequence(place).rope_delta).tolist() == [delta]
        assert number in marks(device, cache, place)
    assert cache.active_batch_size == 0


@pytest.mark.parametrize("index", [-1, 2])
def test_a_sequence_that_is_not_active_cannot_end(cache, index):
    cache.reset_for_new_sequences([3, 7], [0, 0])
    with pytest.raises(ValueError, match=f"sequence {index} is not among the 2"):
        cache.evict(index)


def test_more_rows_than_there_are_is_an_error_that_names_both(cache):
    cache.reset_for_new_sequences([16], [0])
    with pytest.raises(ValueError, match=r"\[17\] tokens exceed the capacity 16"):
        cache.commit_sequence_length(np.array([1]))


@pytest.mark.parametrize("batch", [0, 4])
def test_a_batch_that_does_not_fit_is_an_error(cache, batch):
    with pytest.raises(ValueError, match=f"{batch} sequences, the cache holds 1 to 3"):
        cache.reset_for_new_sequences([0] * batch, [0] * batch)


def test_clearing_leaves_zeros_everywhere(device, cache):
    cache.reset_for_new_sequences([0, 0, 0], [0, 0, 0])
    for tensor in cache.bindings().values():
        device.upload(tensor, np.full(tensor.shape, np.nan, np.float32))
    cache.clear()
    assert all(not device.download(tensor).any() for tensor in cache.bindings().values())
