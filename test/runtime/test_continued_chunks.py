# SPDX-License-Identifier: Apache-2.0
"""Requests whose trajectories continue a chunk, through the whole runtime."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.requests_for_tests import IMAGE, assert_same_answer, assert_same_bits, request

CHUNK = np.linspace(-1, 0.9, 12, dtype=np.float32).reshape(6, 2)
ACTING = request(images=(IMAGE,), max_tokens=30, action_samples=2, denoise_steps=4)


def continuing(**condition):
    """Return ACTING as the continuation of CHUNK."""
    condition = {"executed": 1, "delay": 2} | condition
    return dataclasses.replace(ACTING, previous_chunk=ChunkCondition(actions=CHUNK, **condition))


@pytest.fixture(scope="module")
def trained_runtime(tiny_checkpoint, acting_engine, runtime_device, tmp_path_factory):
    """`acting_engine`'s model, whose expert was trained to continue up to 3 actions."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(tiny_checkpoint, folder / "checkpoint")
    path = folder / "checkpoint" / "action_expert" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rtc_max_delay": 3}))
    config = export(folder / "checkpoint", folder / "engine")
    acting = EngineConfig.load(acting_engine)
    action = dataclasses.replace(config.action, future_start_token_id=acting.action.future_start_token_id)
    stops = acting.stop_token_ids
    dataclasses.replace(config, action=action, stop_token_ids=stops).save(folder / "engine")
    with LLMInferenceRuntime(folder / "engine", runtime_device, prefix_cache_bytes=0) as runtime:
        yield runtime


def test_frozen_actions_are_the_previous_ones_to_the_bit(acting_runtime):
    answer = acting_runtime.handle_request(continuing(form="frozen"))
    np.testing.assert_array_equal(answer.actions[:, :2], np.stack([CHUNK[1:3]] * 2))
    assert (answer.actions[:, 2:5] != CHUNK[3:]).any(axis=(1, 2)).all()


def test_trained_actions_begin_with_the_previous_ones_to_the_bit(trained_runtime):
    answer = trained_runtime.handle_request(continuing(form="trained"))
    np.testing.assert_array_equal(answer.actions[:, :2], np.stack([CHUNK[1:3]] * 2))
    plain = trained_runtime.handle_request(ACTING)
    assert (answer.actions[:, 2:] != plain.actions[:, 2:]).any()


def test_no_action_that_is_given_gives_the_plain_trajectories(trained_runtime):
    answer = trained_runtime.handle_request(continuing(form="trained", delay=0))
    assert_same_answer(answer, trained_runtime.handle_request(ACTING))


def test_guided_actions_are_nearer_to_the_previous_ones_the_higher_their_weight(acting_runtime):
    std = np.array(acting_runtime.config.action.action_space.std)

    def distance(answer) -> np.ndarray:
        return np.abs((answer.actions[:, :5] - CHUNK[1:]) / std).mean(axis=(0, 2))

    plain = distance(acting_runtime.handle_request(ACTING))
    guided = distance(acting_runtime.handle_request(continuing(form="guided")))
    assert (guided[:2] < plain[:2] / 5).all()
    assert guided[4] > guided[:2].max()


def test_paths_are_those_of_the_continued_actions(acting_runtime):
    answer = acting_runtime.handle_request(continuing(form="frozen"))
    expected = acting_runtime.pipeline.action.action_space.integrate(answer.actions, 0.0)
    np.testing.assert_array_equal(answer.paths, expected)


def test_requests_of_a_batch_continue_chunks_of_their_own(acting_runtime):
    requests = [continuing(form="frozen"), ACTING, continuing(form="guided", delay=1)]
    alone = [acting_runtime.handle_request(one) for one in requests]
    for answer, expected in zip(acting_runtime.handle_request(requests), alone, strict=True):
        assert_same_answer(answer, expected)


def test_the_same_condition_gives_the_same_bits(acting_runtime):
    first = acting_runtime.handle_request(continuing(form="guided"))
    acting_runtime.handle_request(continuing(form="frozen", delay=1))
    assert_same_bits(acting_runtime.handle_request(continuing(form="guided")), first)


def test_actions_beyond_the_limits_are_clipped(acting_runtime):
    chunk = np.full((6, 2), 9.0)
    condition = ChunkCondition(actions=chunk, executed=0, delay=1, form="frozen")
    answer = acting_runtime.handle_request(dataclasses.replace(ACTING, previous_chunk=condition))
    high = np.float32(acting_runtime.config.action.action_space.high)
    np.testing.assert_array_equal(answer.actions[:, 0], np.stack([high] * 2))


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"delay": 6}, "previous_chunk: delay must be at most 5, the actions that are left"),
        ({"form": "trained"}, "previous_chunk: form must be guided or frozen: the checkpoint was not"),
    ],
)
def test_conditions_that_do_not_fit_the_engine_are_refused(acting_runtime, condition, message):
    with pytest.raises(ValueError, match=message):
        acting_runtime.handle_request(continuing(**condition))


def test_more_given_actions_than_were_trained_are_refused(trained_runtime):
    with pytest.raises(ValueError, match="delay must be at most 3, for which the checkpoint was trained"):
        trained_runtime.handle_request(continuing(form="trained", delay=4))
