# SPDX-License-Identifier: Apache-2.0
"""The trained policy of the second world."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_tabletop.episodes.closed_loop import goal_of, play
from edgellm_tabletop.episodes.drivers import DATASET, ArmInProcess, PolicyDriver
from edgellm_tabletop.episodes.robot import START_NS, TICK_NS, Robot
from edgellm_tabletop.episodes.summary import describe
from edgellm_tabletop.world import Tabletop
from fixtures.rendering import picture_of

POLICY = Path(__file__).parents[2] / "models" / "so101"
SEEDS = 900_000, 900_003, 900_006  # placed with time to spare, on the left, on the right, on the left


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="one device is enough for rounding not to change an episode")
@pytest.mark.parametrize(("delay_steps", "follow_time"), [(0, 0.0), (8, 1.0)])
def test_the_trained_policy_places_the_block_within_the_limits(tmp_path, delay_steps, follow_time):
    world = Tabletop()
    picture_of(world)
    export(POLICY, tmp_path / "engine", dataset=DATASET)
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        for seed in SEEDS:
            robot = Robot(world, START_NS + TICK_NS)
            robot.reset(seed, goal_of(seed))
            arm = ArmInProcess(robot, 0.1 * delay_steps, follow_time=follow_time)
            driver = PolicyDriver(robot, arm, runtime, seed)
            drive = describe(robot, seed, play(robot, driver, delay_steps, at_rest=follow_time > 0))
            assert (drive["outcome"], drive["violations"], drive["refused"]) == ("placed", 0, {})
            assert drive["largest_speed"] <= 1 + 1e-6
    world.close()
