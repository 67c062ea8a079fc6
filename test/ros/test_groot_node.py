# SPDX-License-Identifier: Apache-2.0
"""A GR00T in the node: its chunks of actions equal the runtime's own answers."""

from __future__ import annotations

import numpy as np
import pytest
from edgellm_ros.action import Plan
from edgellm_ros.msg import PreviousChunk

from edgellm_ros.diffusion.chunking import ChunkCondition
from fixtures.groot_checkpoint import ROBOT, GrootShape, write_groot_of_lerobot
from fixtures.peer import image_message
from fixtures.policy_robot import NAMES, STATE, TASK, TOP, WRIST, answer, export_policy, values

SHAPE = GrootShape(
    cameras=("top", "wrist"),
    state={"arm": 2, "gripper": 1},
    actions={"arm": 3, "gripper": 1},
    robots=(ROBOT,),
)


@pytest.fixture(scope="module")
def policy_engine(tmp_path_factory):
    """The engine of a GR00T, in place of that of a SmolVLA."""
    folder = tmp_path_factory.mktemp("groot")
    return export_policy(folder, lambda path: write_groot_of_lerobot(path, by_key=False, shape=SHAPE))


@pytest.fixture(autouse=True)
def robot(policy_node):
    """The robot, whose node has no input of earlier tests."""
    policy_node.restart()
    return policy_node


def test_a_command_gives_the_chunk_that_the_runtime_gives_for_the_same_inputs(robot, peer, policy_runtime):
    stamp = robot.all_inputs()
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))
    (chunk,) = peer.received["action_chunk"]
    assert (list(chunk.names), chunk.header.stamp, chunk.horizon) == (NAMES, stamp, SHAPE.steps)


def test_a_goal_may_continue_a_chunk(robot, peer, policy_runtime):
    robot.all_inputs()
    chunk = robot.chunk()
    first, images = values(chunk), [image_message(TOP), image_message(WRIST)]
    previous = [PreviousChunk(chunk=chunk, executed=1, delay=1, form="frozen")]
    goal = Plan.Goal(prompt=TASK, images=images, state=STATE.tolist(), previous_chunk=previous)
    result = peer.plan(goal)
    assert (result.termination_reason, result.message) == (Plan.Result.COMPLETED, "")
    found = values(result.action_chunks[0])
    condition = ChunkCondition(actions=first, executed=1, delay=1, form="frozen")
    np.testing.assert_array_equal(found, answer(policy_runtime, previous_chunk=condition))
    np.testing.assert_array_equal(found[0], first[1])


def test_a_goal_without_all_cameras_is_an_error(robot):
    reason, message = robot.refusal(images=[image_message(TOP)], state=STATE.tolist())
    assert reason == Plan.Result.ERROR
    assert message.startswith("the goal has 1 images, expected one of each camera: top, wrist")
