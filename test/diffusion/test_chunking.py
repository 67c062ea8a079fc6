# SPDX-License-Identifier: Apache-2.0
"""Weights of a previous chunk against published values, and refused conditions."""

import dataclasses

import numpy as np
import pytest

from edgellm_ros.diffusion.chunking import (
    ChunkCondition,
    conditioned_run,
    guidance,
    prefix_weights,
    velocity_ramp,
)
from edgellm_ros.engine_directory.config import EngineConfig

CHUNK = np.arange(12, dtype=np.float32).reshape(6, 2) / 10  # of the tiny engine's shape


@pytest.fixture(scope="module")
def action(tiny_engine):
    return EngineConfig.load(tiny_engine).action


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0, 0, 0, 0]),
        # c (e^c - 1) / (e - 1) of the linear ones
        ("exp", [1, 1, 0.5705890, 0.2870724, 0.1144922, 0.0257702, 0, 0, 0, 0]),
        ("ones", [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]),
        ("zeros", [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_weights_are_those_of_the_published_implementation(schedule, expected):
    np.testing.assert_allclose(prefix_weights(2, 6, 10, schedule), expected, atol=1e-6)


def test_the_end_of_the_weights_comes_before_their_start():
    np.testing.assert_array_equal(prefix_weights(5, 3, 6, "linear"), [1, 1, 1, 0, 0, 0])


def test_the_ramp_of_frozen_actions_is_that_of_gr00t():
    """Of linspace(0, 1, 4 + 2), (1 - e^(-6 u)) / (1 - e^-6) without both ends."""
    expected = [0, 0, 0.7005423, 0.9115415, 0.9750933, 0.9942347, 1, 1]
    np.testing.assert_allclose(velocity_ramp(2, 6, 8), expected, atol=1e-6)


def test_a_ramp_without_rows_between_is_a_step():
    np.testing.assert_array_equal(velocity_ramp(2, 2, 4), [0, 0, 1, 1])


def test_guidance_is_limited_where_it_would_be_infinite():
    assert guidance(0.0, 5.0) == 5.0
    assert guidance(0.01, 5.0) == 5.0
    assert guidance(0.5, 5.0) == pytest.approx(2.0)  # (0.5 / 0.5) (0.25 + 0.25) / 0.25
    assert guidance(0.9, 50.0) == pytest.approx(0.1 / 0.9 * (0.81 + 0.01) / 0.01)


def test_the_previous_chunk_is_shifted_by_the_executed_actions_and_padded():
    run = conditioned_run(ChunkCondition(actions=CHUNK, executed=2, delay=1), CHUNK[2:], 4, 6)
    np.testing.assert_array_equal(run.previous, [*CHUNK[2:], [0, 0], [0, 0]])


def test_the_limit_of_the_guidance_is_the_number_of_steps_by_default():
    run = conditioned_run(ChunkCondition(actions=CHUNK, executed=0, delay=2), CHUNK, 7, 6)
    np.testing.assert_array_equal(run.pull[0, :2], [7, 7])
    limited = conditioned_run(
        ChunkCondition(actions=CHUNK, executed=0, delay=2, max_guidance_weight=3.0), CHUNK, 7, 6
    )
    np.testing.assert_array_equal(limited.pull[0, :2], [3, 3])


def test_trained_actions_have_no_influence_behind_them_unless_a_horizon_asks_for_it():
    run = conditioned_run(ChunkCondition(actions=CHUNK, executed=0, delay=2, form="trained"), CHUNK, 5, 6)
    assert not run.pull.any()
    faded = conditioned_run(
        ChunkCondition(actions=CHUNK, executed=0, delay=2, form="trained", horizon=4), CHUNK, 5, 6
    )
    np.testing.assert_allclose(faded.pull[0], [0, 0, 5 * 2 / 3, 5 / 3, 0, 0], rtol=1e-6)
    assert (run.kept, run.clean) == (faded.kept, faded.clean) == (2, 2)


def test_actions_are_copied(action):
    chunk = CHUNK.copy()
    condition = ChunkCondition(actions=chunk, executed=1, delay=1)
    chunk[:] = np.nan
    condition.check(action)
    np.testing.assert_array_equal(condition.actions, CHUNK)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": CHUNK[0]}, r"actions must have shape \[T, A\], got \[2\]"),
        ({"actions": CHUNK * np.nan}, "actions has values that are not finite"),
        ({"actions": "fast"}, "actions must be an array of numbers, got 'fast'"),
        ({"executed": -1}, "executed must be an integer of at least 0, got -1"),
        ({"executed": 1.5}, "executed must be an integer of at least 0, got 1.5"),
        ({"delay": -1}, "delay must be an integer of at least 0, got -1"),
        ({"delay": True}, "delay must be an integer of at least 0, got True"),
        ({"horizon": 0}, "horizon must be an integer of at least 1, got 0"),
        ({"form": "off"}, "form must be one of guided, frozen, trained, got 'off'"),
        ({"schedule": "cosine"}, "schedule must be one of linear, exp, ones, zeros, got 'cosine'"),
        ({"max_guidance_weight": 0.0}, "max_guidance_weight must be a number above 0 and up to 1000, got 0"),
        ({"max_guidance_weight": np.nan}, "max_guidance_weight must be a number above 0"),
        ({"max_guidance_weight": "5"}, "max_guidance_weight must be a number above 0 .* got '5'"),
    ],
)
def test_wrong_conditions_are_errors_that_name_the_value(changes, message):
    with pytest.raises(ValueError, match=message):
        ChunkCondition(**({"actions": CHUNK, "executed": 2, "delay": 1} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": CHUNK[:5]}, r"actions must have shape \[6, 2\], got \[5, 2\]"),
        ({"executed": 6}, "executed must be below 6, the actions of a chunk, got 6"),
        ({"delay": 5}, r"delay must be at most 4, the actions that are left of the previous chunk .* got 5"),
        ({"horizon": 5}, r"horizon must be from 1 \(delay\) to 4 \(6 - executed\), got 5"),
        ({"delay": 3, "horizon": 2}, r"horizon must be from 3 \(delay\) to 4 \(6 - executed\), got 2"),
        ({"form": "trained"}, r"the checkpoint was not trained to continue chunks \(rtc_max_delay in its"),
    ],
)
def test_conditions_that_do_not_fit_the_action_head_are_refused(action, changes, message):
    condition = ChunkCondition(**({"actions": CHUNK, "executed": 2, "delay": 1} | changes))
    with pytest.raises(ValueError, match=message):
        condition.check(action)


def test_a_longer_delay_than_the_checkpoint_was_trained_for_is_refused(action):
    trained = dataclasses.replace(action, rtc_max_delay=2)
    ChunkCondition(actions=CHUNK, executed=1, delay=2, form="trained").check(trained)
    with pytest.raises(ValueError, match=r"delay must be at most 2, for which the checkpoint was trained"):
        ChunkCondition(actions=CHUNK, executed=1, delay=3, form="trained").check(trained)


def test_more_trained_actions_than_a_chunk_has_are_refused(action):
    with pytest.raises(ValueError, match="rtc_max_delay must be from 0 to 6, the actions of a chunk, got 7"):
        dataclasses.replace(action, rtc_max_delay=7)
