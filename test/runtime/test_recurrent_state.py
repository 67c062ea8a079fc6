# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.recurrent_config import RecurrentConfig
from edgellm_ros.runtime.batch.recurrent_state import RecurrentState
from fixtures.on_device import put

ROWS, LAYERS = 4, 2


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


def test_a_moved_row_takes_its_state_along_and_a_cleared_row_has_zeros(device, state):
    step(device, state, 10, [1, 1, 1])
    state.move(2, 0)
    state.close(2)
    state.clear_row(1)
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
