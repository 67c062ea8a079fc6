# SPDX-License-Identifier: Apache-2.0
"""An X-VLA in the node: its chunks of actions equal the runtime's own answers."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.policy_robot import NAMES, answer, export_policy
from fixtures.xvla_checkpoint import write_xvla


@pytest.fixture(scope="module")
def policy_engine(tmp_path_factory):
    """The engine of an X-VLA, in place of that of a SmolVLA."""
    return export_policy(tmp_path_factory.mktemp("xvla"), write_xvla)


def test_a_command_gives_the_chunk_that_the_runtime_gives_for_the_same_inputs(
    policy_node, peer, policy_runtime
):
    policy_node.restart()
    stamp = policy_node.all_inputs()
    np.testing.assert_array_equal(policy_node.actions(), answer(policy_runtime))
    (chunk,) = peer.received["action_chunk"]
    assert (list(chunk.names), chunk.header.stamp) == (NAMES, stamp)
