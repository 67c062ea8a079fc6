# SPDX-License-Identifier: Apache-2.0
"""Drivers without topics: the expert and a policy, with the logic of edgellm_arm."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.ros.arm.arm_follower import ArmFollower, Settings
from edgellm_ros.ros.arm.chunk import read_chunk
from edgellm_ros.ros.arm.contract import Contract, read_contract
from edgellm_ros.ros.arm.motion import Motion
from edgellm_ros.ros.chunk_checks import RefusedChunkError
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_tabletop.episodes.controller import NANOSECONDS
from edgellm_tabletop.episodes.robot import Plan, Robot
from edgellm_tabletop.units import NAMES
from edgellm_tabletop.world import INSTRUCTIONS, STEP_S

CONTRACT = Path(__file__).parents[1] / "contract.yaml"
DATASET = Path(__file__).parents[1] / "meta"  # names and rate of the policies for this world
EXPERT_ROWS = 30  # of a chunk of the expert
BLEND_S = 0.2  # defaults of edgellm_arm
CHUNK_AGE_S, STATE_AGE_S = 2.0, 0.2


@cache
def contract() -> Contract:
    """Return the contract between a policy for this world and its arm."""
    return read_contract(CONTRACT)


def arm_settings(delay: float, blend: float = BLEND_S, follow_time: float = 0.0) -> dict[str, Any]:
    """Return the parameters of edgellm_arm for chunks that come `delay` seconds late."""
    times = {"blend_time": blend, "follow_time": follow_time}
    return {**times, "max_chunk_age": CHUNK_AGE_S + delay, "max_state_age": STATE_AGE_S}


class ArmInProcess:
    """Follows chunks as the node edgellm_arm does, with its ArmFollower."""

    def __init__(
        self, robot: Robot, delay: float = 0.0, blend: float = BLEND_S, follow_time: float = 0.0
    ) -> None:
        settings = Settings(**arm_settings(delay, blend, follow_time), future_tolerance=0.5, dry_run=False)
        self.refused: Counter[str] = Counter()
        self._robot = robot
        self._follower = ArmFollower(contract(), settings)
        self._sent: Motion | None = None
        self.start()

    def start(self) -> None:
        """Begin an episode, at rest."""
        self._follower.start(self._robot.now)
        self._sent = None
        self.on_tick()

    def on_tick(self) -> None:
        """Measure the joints, and check that the arm may go on."""
        now = self._robot.now * 1e-9
        self._follower.observe(contract().ros_names, self._robot.world.positions, now)
        self._follower.step(now, self._robot.now)
        self._send()

    def follow(self, stamp: int, number: int, targets: NDArray[np.float32], dt: float) -> str:
        """Follow a chunk [T, 6] of the frame at `stamp` (ns); return why not, or ""."""
        fields = {"dt": dt, "horizon": len(targets), "names": NAMES, "units": [""] * len(NAMES)}
        try:
            chunk = read_chunk(contract(), stamp, request_id=str(number), values=targets.ravel(), **fields)
            self._follower.add(chunk, self._robot.now * 1e-9, self._robot.now)
        except RefusedChunkError as error:
            return error.reason
        self._send()
        return ""

    def _send(self) -> None:
        motion, before = self._follower.motion, self._sent
        if motion is None or motion is before:
            return
        self._sent = motion
        now = self._robot.now
        start = now + round((motion.start - now * 1e-9) * NANOSECONDS)
        times = [start + round(k * motion.period * NANOSECONDS) for k in range(len(motion.positions))]
        self._robot.controller.follow(now, times, motion.positions, motion.speeds)


@dataclass(frozen=True)
class Seen:
    """What a chunk is computed from."""

    stamp: int  # ns
    image: NDArray[np.uint8] | None  # [H, W, 3] RGB; None for the expert
    state: NDArray[np.float64]  # [6] in the policy's units
    targets: NDArray[np.float32] | None = None  # [T, 6], of the expert


class ExpertDriver:
    """The scripted controller: chunks that it would execute from the frame on."""

    def __init__(self, robot: Robot, arm: ArmInProcess) -> None:
        self._robot, self._arm = robot, arm
        self.on_tick = arm.on_tick

    def look(self) -> Seen:
        """Compute the chunk at once: it needs the world as it is now."""
        return expert_view(self._robot)

    def answer(self, seen: Seen) -> Plan:
        """Follow the chunk."""
        assert seen.targets is not None
        refused = self._arm.follow(seen.stamp, seen.stamp, seen.targets, STEP_S)
        return Plan(seen.targets, 0.0, refused)


class PolicyDriver:
    """A policy in the runtime."""

    def __init__(self, robot: Robot, arm: ArmInProcess, runtime: LLMInferenceRuntime, seed: int) -> None:
        self._robot, self._arm, self._runtime, self._seed = robot, arm, runtime, seed
        self.on_tick = arm.on_tick

    def look(self) -> Seen:
        """Take a picture."""
        return policy_view(self._robot)

    def answer(self, seen: Seen) -> Plan:
        """Compute the chunk and follow it."""
        assert seen.image is not None
        begin = time.perf_counter()
        response = self._runtime.handle_request(
            LLMGenerationRequest(
                INSTRUCTIONS[self._robot.world.goal],
                images=(seen.image,),
                state=seen.state,
                noise_seed=self._seed,
            )
        )
        seconds = time.perf_counter() - begin
        policy = self._runtime.config.policy
        assert response.actions is not None
        assert policy is not None
        targets = np.asarray(response.actions[0], np.float32)
        columns = [policy.action_space.names.index(name) for name in NAMES]
        refused = self._arm.follow(seen.stamp, seen.stamp, targets[:, columns], policy.action_space.dt)
        return Plan(targets[:, columns], seconds, refused)


def expert_view(robot: Robot) -> Seen:
    """Return the scripted controller's chunk for the present moment."""
    return Seen(robot.now, None, policy_state(robot), robot.world.expert_chunk(EXPERT_ROWS))


def policy_view(robot: Robot) -> Seen:
    """Return the camera's picture and the joints of the present moment."""
    return Seen(robot.now, robot.world.image(), policy_state(robot))


def policy_state(robot: Robot) -> NDArray[np.float64]:
    """Return the joints [6] in the policy's units, as edgellm_arm converts them."""
    return contract().to_policy(robot.world.positions)
