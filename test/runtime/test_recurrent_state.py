# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.recurrent_config import RecurrentConfig
from edgellm_ros.runtime.batch.recurrent_state import RecurrentState
from edgellm_ros.runtime.prefix.prefix_cache import PAGE, Page, Prefix
from edgellm_ros.runtime.prefix.state_snapshots import StateSnapshots
from fixtures.on_device import put

ROWS, LAYERS = 4, 2
SEQUENCE = SimpleNamespace()


@pytest.fixture
def state(device, kernels) -> RecurrentState:
    config = RecurrentConfig("mamba2", LAYERS, num_heads=2, key_dim=3, value_dim=4, conv_dim=5, conv_kernel=4)
    return RecurrentState(device, kernels, config, max_batch_size=ROWS, conv_dtype=np.dtype(np.float16))


def run(device, state, rows: range, value: float) -> None:
    """Write `value` + row to all next states of these rows, as an engine does."""
    for name, tensor in state.bindings(rows).items():
        if name.startswith("present_"):
            values = (
                np.zeros(tensor.shape)
                + value
                + np.arange(rows.start, rows.stop)[(slice(None), *[None] * (len(tensor.shape) - 1))]
            )
            device.upload(tensor, values.astype(tensor.dtype))


def step(device, state, value: float, counts) -> None:
    run(device, state, range(len(counts)), value)
    state.commit(put(device, np.array(counts, np.int64)))


def contents(device, state) -> list[float]:
    """Return the value in each row; all tensors of a row must have it."""
    tensors = [device.download(tensor) for tensor in state.committed]
    for row in range(ROWS):
        assert len({float(value) for tensor in tensors for value in tensor[:, row].ravel()}) == 1
    return tensors[0][0, :, 0].tolist()


def test_a_step_too_many_leaves_the_state_of_a_finished_row(device, state):
    step(device, state, 10, [1, 1, 1])
    step(device, state, 20, [1, 0, 1])
    assert contents(device, state) == [20, 11, 22, 0]


def test_a_prefill_of_later_rows_leaves_the_others(device, state):
    step(device, state, 10, [1, 1])
    run(device, state, range(2, 4), 50)
    state.commit_rows(range(2, 4), put(device, np.array([7, 9])))
    assert contents(device, state) == [10, 11, 52, 53]


def test_a_moved_row_takes_its_state_along_and_an_opened_row_begins_with_zeros(device, state):
    step(device, state, 10, [1, 1, 1])
    state.move(2, 0)
    state.close(2)
    state.open(1, SEQUENCE)
    assert contents(device, state) == [12, 0, 12, 0]


def test_inputs_and_outputs_are_different_memory_and_keep_their_addresses(state):
    bindings = state.bindings(range(1, 3))
    assert len({tensor.pointer for tensor in bindings.values()}) == len(bindings) == 4 * LAYERS
    assert bindings[names.conv_state(1)].shape == (2, 5, 3)
    assert bindings[names.present_recurrent_state(0)].shape == (2, 2, 3, 4)
    again = state.bindings(range(1, 3))
    assert [tensor.pointer for tensor in again.values()] == [tensor.pointer for tensor in bindings.values()]


def test_clearing_removes_values_that_are_not_finite(device, state):
    step(device, state, np.nan, [1, 1, 1, 1])
    state.clear()
    assert contents(device, state) == [0, 0, 0, 0]


def prefix(length: int) -> Prefix:
    return Prefix(tuple(Page(i, (), None) for i in range(-(-length // PAGE))), length)


@pytest.fixture
def snapshots(device, state) -> StateSnapshots:
    return StateSnapshots(device, state, 2 * state.row_bytes)


def test_a_prompt_reuses_the_longest_prefix_with_a_state(device, state, snapshots):
    keys = list(range(100))
    for value, length in ((10, 40), (30, 70)):
        step(device, state, value, [1])
        snapshots.insert("", keys[:length], 0)
    found = snapshots.match("", keys, prefix(99))
    assert (found.length, len(found.pages)) == (70, 3)
    assert snapshots.match("", keys, prefix(69)).length == 40
    assert snapshots.match("", keys, prefix(39)).length == 0
    assert snapshots.match("another adapter", keys, prefix(99)).length == 0
    assert snapshots.match("", [*keys[:30], -5, *keys[31:]], prefix(99)).length == 0
    snapshots.load("", keys, 40, 3)
    assert contents(device, state) == [30, 0, 0, 10]


def test_the_least_recently_used_state_makes_room(snapshots):
    for first in (1, 2):
        snapshots.insert("", [first, 5], 0)
    snapshots.match("", [1, 5, 6], prefix(2))
    snapshots.insert("", [3, 5], 0)
    assert [snapshots.has("", [first, 5]) for first in (1, 2, 3)] == [True, False, True]
    assert len(snapshots) == 2


def test_states_of_a_removed_adapter_are_dropped(snapshots):
    snapshots.insert("a", [1], 0)
    snapshots.insert("b", [1], 0)
    snapshots.remove("a")
    assert not snapshots.has("a", [1])
    assert snapshots.has("b", [1])


def test_a_budget_below_one_state_stores_nothing(device, state):
    snapshots = StateSnapshots(device, state, state.row_bytes - 1)
    snapshots.insert("", [1, 2], 0)
    assert snapshots.match("", [1, 2, 3], prefix(2)).length == 0
