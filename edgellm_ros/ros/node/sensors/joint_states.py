# SPDX-License-Identifier: Apache-2.0
"""The robot's state for a policy: joint positions in the policy state's order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from sensor_msgs.msg import JointState

from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.echo import quoted
from edgellm_ros.ros.node.sensors.input_time import StaleInputError
from edgellm_ros.ros.node.sensors.sample_buffer import SampleBuffer


def state_joints(given: Sequence[str], policy: PolicyConfig | None) -> tuple[str, ...]:
    """Return a policy's joints, by the parameter `state_joints`; () without a policy.

    Without names they are those of the policy's state, and none if it takes no state. ValueError for another
    number of joints than values of the state, for a repeated name, and for names without a state.
    """
    names = tuple(name for name in given if name)
    if policy is None or policy.state is None:
        if names:
            expected = "policies, this engine is none" if policy is None else "policies that take a state"
            raise ValueError(f"parameter state_joints is for {expected}, got {quoted(', '.join(names))}")
        return ()
    state = policy.state
    if not names:
        return state.names
    if len(names) != state.dim or len(set(names)) != len(names):
        raise ValueError(
            f"parameter state_joints must be {state.dim} different joints, for {', '.join(state.names)}, "
            f"got {quoted(', '.join(names))}"
        )
    return names


class JointStates(SampleBuffer):
    """The last positions of the joints of a policy's state.

    Messages with another number of positions than names, or with a position that is not finite, are refused.
    """

    def __init__(self, joints: tuple[str, ...]) -> None:
        super().__init__("joint state", self._positions)
        self._joints = joints
        self._lacking = ""

    def is_complete(self, message: JointState) -> bool:
        """Tell whether a message has all joints.

        Other messages, such as those of another part of the robot, do not count.
        """
        missing = [joint for joint in self._joints if joint not in message.name]
        self._lacking = quoted(", ".join(missing))
        return not missing

    def state_at(self, stamp: float, max_age: float, ago: float = 0.0) -> np.ndarray:
        """Return the state [D] that is nearest to `ago` seconds before `stamp` (seconds).

        Without one around that time, as at the start, the next one counts. StaleInputError if no complete
        message has ever arrived, or the newest is more than `max_age` seconds older than `stamp`; ValueError
        if the newest is invalid.
        """
        samples = self._required(self.samples_for(stamp, max_age, before=ago))
        return samples[np.abs(samples[:, 0] - (stamp - ago)).argmin(), 1:]

    def newest_state(self, now: int, max_age: float) -> np.ndarray:
        """Return the newest state [D], at most `max_age` seconds old at `now` (ns).

        Raises the errors of `state_at`.
        """
        return self._required(self.samples_now(now, max_age))[-1, 1:]

    def _required(self, samples: np.ndarray | None) -> np.ndarray:
        if samples is not None:
            return samples
        lacking = f"; the newest message lacks {self._lacking}" if self._lacking else ""
        raise StaleInputError(
            f"no joint state with {', '.join(self._joints)} (parameter state_joints) has arrived on "
            f"~/joint_states{lacking}"
        )

    def _positions(self, message: JointState) -> tuple[float, ...]:
        names, positions = message.name, message.position
        if len(names) != len(positions):
            raise ValueError(f"a joint state has {len(names)} names and {len(positions)} positions")
        found = dict(zip(names, positions, strict=True))
        for joint in self._joints:
            if not math.isfinite(found[joint]):
                raise ValueError(
                    f"a joint state is not finite: the position of {quoted(joint)} is {found[joint]}"
                )
        return tuple(found[joint] for joint in self._joints)
