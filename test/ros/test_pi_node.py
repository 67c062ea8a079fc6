# SPDX-License-Identifier: Apache-2.0
"""A pi0.5 in the node: its chunks of actions equal the runtime's own answers."""

from __future__ import annotations

import numpy as np
import pytest
from edgellm_ros.action import Plan

from fixtures.peer import image_message
from fixtures.pi_checkpoint import write_pi
from fixtures.policy_robot import NAMES, STATE, TASK, TOP, WRIST, answer, export_policy, values


@pytest.fixture(scope="module")
def policy_engine(tmp_path_factory):
    """The engine of a pi0.5, in place of that of a SmolVLA."""
    return export_policy(tmp_path_factory.mktemp("pi"), write_pi)


def test_a_command_gives_the_chunk_that_the_runtime_gives_for_the_same_inputs(
    policy_node, peer, policy_runtime
):
    policy_node.restart()
    stamp = policy_node.all_inputs()
    np.testing.assert_array_equal(policy_node.actions(), answer(policy_runtime))
    (chunk,) = peer.received["action_chunk"]
    assert (list(chunk.names), chunk.header.stamp) == (NAMES, stamp)


def test_the_state_of_a_goal_is_part_of_the_prompt(peer, policy_runtime):
    images = [image_message(TOP), image_message(WRIST)]
    result = peer.plan(Plan.Goal(prompt=TASK, images=images, state=(STATE + 1).tolist()))
    assert (result.termination_reason, result.message) == (Plan.Result.COMPLETED, "")
    found = values(result.action_chunks[0])
    np.testing.assert_array_equal(found, answer(policy_runtime, state=STATE + 1))
    assert np.abs(found - answer(policy_runtime)).max() > 1e-4
