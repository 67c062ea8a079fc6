# SPDX-License-Identifier: Apache-2.0
"""The kernels of verified chains of hybrids, against a reference in float64.

The reference is the recurrence, token by token.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS
from edgellm_ros.kernels import ChainInputs
from edgellm_ros.kernels.tree_protocol import MOST_CHAIN_TOKENS
from fixtures.device_under_test import Side

LAYERS, BATCH, TOKENS = 2, 4, 7
COUNTS = [3, 0, 7]  # rows 0..2 of the batch
SIZES = [  # heads, key heads, dk, groups of each head, columns
    pytest.param(4, 2, 16, 1, 32, id="two heads of a key"),
    pytest.param(3, 1, 24, 5, 4, id="groups of four columns"),
    pytest.param(2, 2, 128, 1, 128, id="published sizes"),
    pytest.param(1, 1, 5, 3, 1, id="single columns"),
    pytest.param(2, 1, 8, 1, 288, id="more columns than a block has"),
    pytest.param(1, 1, 300, 1, 32, id="more rows than registers hold"),
]


@pytest.fixture
def side(each_side) -> Side:
    return each_side


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def written(side: Side, values: np.ndarray):
    """Return a tensor of `ChainInputs` to which a run wrote values [L,b,tokens,width]."""
    layers, _, _, width = values.shape
    room = np.full((layers, BATCH * CHAIN_TOKENS * width), np.nan, np.float32)
    room[:, : values[0].size] = values.reshape(layers, -1)
    return side.tensor(room.reshape(layers, BATCH, CHAIN_TOKENS, width))


def advanced(state, keys, values, decays, strengths):
    """Return the state [dk,dv] of a head after tokens, in float64."""
    state = state.astype(np.float64)
    for token in range(len(keys)):
        state = np.exp(decays[token]) * state
        update = values[token]
        if strengths is not None:
            update = strengths[token] * (update - keys[token] @ state)
        state = state + np.outer(keys[token], update)
    return state


@pytest.mark.parametrize("with_strengths", [True, False], ids=["delta rule", "mamba2"])
@pytest.mark.parametrize(("heads", "key_heads", "key_dim", "parts", "columns"), SIZES)
def test_states_after_the_accepted_tokens(
    side, rng, heads, key_heads, key_dim, parts, columns, with_strengths
):
    rows = len(COUNTS)
    states = rng.standard_normal((LAYERS, BATCH, heads * parts, key_dim, columns)).astype(np.float32)
    keys = rng.standard_normal((LAYERS, rows, TOKENS, key_heads, key_dim))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    values = rng.standard_normal((LAYERS, rows, TOKENS, heads, parts, columns))
    decays = -rng.uniform(0, 3, (LAYERS, rows, TOKENS, heads))
    decays[0, 2, 4] = -200  # forgets all
    strengths = rng.uniform(0, 1, (LAYERS, rows, TOKENS, heads)) if with_strengths else None
    given = [x if x is None else x.astype(np.float32) for x in (keys, values, decays, strengths)]
    flat = [x if x is None else written(side, x.reshape(LAYERS, rows, TOKENS, -1)) for x in given]
    found = side.tensor(states)
    unused = side.tensor(np.zeros((LAYERS, BATCH, CHAIN_TOKENS, 1), np.float32))
    side.trees.advance_states(found, ChainInputs(unused, *flat), TOKENS, side.tensor(COUNTS, np.int64))
    expected = states.copy()
    for layer, row, head, part in np.ndindex(LAYERS, rows, heads, parts):
        at = layer, row, slice(COUNTS[row])
        strength = None if strengths is None else given[3][at][:, head]
        expected[layer, row, head * parts + part] = advanced(
            states[layer, row, head * parts + part],
            given[0][at][:, head * key_heads // heads],
            given[1][at][:, head, part],
            given[2][at][:, head],
            strength,
        )
    np.testing.assert_allclose(side.read(found), expected, atol=2e-5)
    np.testing.assert_array_equal(side.read(found)[:, [1, 3]], states[:, [1, 3]])


@pytest.mark.parametrize("past", [1, 3, 9])
def test_windows_after_the_accepted_tokens(side, rng, past):
    channels, rows = 5, len(COUNTS)
    windows = rng.standard_normal((LAYERS, BATCH, channels, past)).astype(np.float32)
    inputs = rng.standard_normal((LAYERS, rows, TOKENS, channels)).astype(np.float32)
    found = side.tensor(windows)
    side.trees.advance_windows(found, written(side, inputs), TOKENS, side.tensor(COUNTS, np.int64))
    expected = windows.copy()
    for row, count in enumerate(COUNTS):
        history = np.concatenate([windows[:, row], inputs[:, row, :count].transpose(0, 2, 1)], axis=-1)
        expected[:, row] = history[..., history.shape[-1] - past :]
    np.testing.assert_array_equal(side.read(found), expected)


@pytest.mark.parametrize("tokens", [0, CHAIN_TOKENS + 1])
def test_a_chain_of_more_tokens_than_there_is_room_for_is_refused(side, tokens):
    windows, inputs = (side.tensor(np.zeros(shape, np.float32)) for shape in ((1, 1, 2, 3), (1, 1, 8, 2)))
    with pytest.raises(ValueError, match=f"a chain of {tokens} tokens, expected 1 to 8"):
        side.trees.advance_windows(windows, inputs, tokens, side.tensor([0], np.int64))


def test_the_kernels_take_as_many_tokens_as_the_graphs_output():
    assert MOST_CHAIN_TOKENS == CHAIN_TOKENS
