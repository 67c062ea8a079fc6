# SPDX-License-Identifier: Apache-2.0
"""The contract between a policy and an arm: names, units, limits and topics.

A YAML file, which docs/arm.md describes. No unit and no limit has a default. Needs no ROS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.echo import printable, quoted
from edgellm_ros.engine_directory.schema import from_dict
from edgellm_ros.ros.arm.motion import averaged_periods

# From the policy's unit to that of ROS; None = only the end points of the range tell.
UNITS = {"degrees": math.pi / 180, "radians": 1.0, "metres": 1.0, "percent": None}
TRAJECTORY, FORWARD = "joint_trajectory", "forward_command"
STANDS_S = 0.3  # longest time from a stop or the watchdog to standing still
TOPIC = re.compile(r"(?!.*__)(~/|/)?[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*")
MAX_BYTES = 1_000_000
OPTIONAL: dict[str, Any] = {"sign": 1, "scale": 1.0, "offset": 0.0, "end_points": None}  # of a joint


@dataclass(frozen=True)
class JointLimits:
    """What a joint may do, in rad or m and seconds."""

    position: tuple[float, ...]  # lowest and highest
    speed: float
    acceleration: float
    jerk: float
    deviation: float  # farthest that a chunk's first row may be from the arm, and the arm from its command

    def __post_init__(self) -> None:
        if not _is_range(self.position):
            raise ValueError(f"position must be [lowest, highest], got {quoted(list(self.position))}")
        for name in ("speed", "acceleration", "jerk", "deviation"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    def stop_s(self, period: float) -> float:
        """Return the longest time in s from a command to stop to standing still.

        period: of the motion, in s. Two periods pass before the joint brakes.
        """
        averaged = averaged_periods(np.array(self.acceleration), np.array(self.jerk), period)
        return self.speed / self.acceleration + (int(averaged) + 2) * period


@dataclass(frozen=True)
class EndPoints:
    """Two positions on both sides, such as a gripper closed and open."""

    policy: tuple[float, ...]
    ros: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("policy", "ros"):
            values = getattr(self, name)
            if len(values) != 2 or not all(map(math.isfinite, values)) or values[0] == values[1]:
                raise ValueError(f"{name} must be two different numbers, got {quoted(list(values))}")


@dataclass(frozen=True)
class Joint:
    """One joint: names on both sides, and how positions convert.

    ROS has `sign * scale * unit * value + offset`, or the straight line through the end points.
    """

    policy: str
    ros: str
    unit: str
    sign: int
    scale: float
    offset: float  # rad or m
    end_points: EndPoints | None
    limits: JointLimits

    def __post_init__(self) -> None:
        if not self.policy or not self.ros:
            raise ValueError("policy and ros must be names, got an empty one")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {quoted(self.unit)}")
        if self.sign not in (1, -1):
            raise ValueError(f"sign must be 1 or -1, got {self.sign}")
        if not 0 < self.scale < math.inf or not math.isfinite(self.offset):
            raise ValueError(f"scale must be above 0 and offset finite, got {self.scale} and {self.offset}")
        if self.end_points is None and UNITS[self.unit] is None:
            raise ValueError("unit percent needs end_points: {policy: [0, 100], ros: [AT_0, AT_100]}")
        if self.end_points is not None and (self.sign, self.scale, self.offset) != (1, 1.0, 0.0):
            raise ValueError("end_points replace sign, scale and offset: give one or the other")

    @property
    def line(self) -> tuple[float, float]:
        """The factor and the offset of ROS's value as a line over the policy's."""
        if self.end_points is None:
            return self.sign * self.scale * (UNITS[self.unit] or 1.0), self.offset
        (x0, x1), (y0, y1) = self.end_points.policy, self.end_points.ros
        factor = (y1 - y0) / (x1 - x0)
        return factor, y0 - factor * x0


@dataclass(frozen=True)
class Camera:
    """A camera of the policy, and the topic of its frames."""

    policy: str
    topic: str

    def __post_init__(self) -> None:
        _check_topic(self.topic)


@dataclass(frozen=True)
class Controller:
    """What drives the joints."""

    kind: str  # TRAJECTORY or FORWARD
    topic: str

    def __post_init__(self) -> None:
        if self.kind not in (TRAJECTORY, FORWARD):
            raise ValueError(f"kind must be one of {TRAJECTORY}, {FORWARD}, got {quoted(self.kind)}")
        _check_topic(self.topic)


@dataclass(frozen=True)
class Contract:
    """The file's content. Arrays over joints are in the order of `joints`."""

    rate: float  # Hz: of the trajectory's points, or of the commands
    controller: Controller
    state_topic: str
    cameras: tuple[Camera, ...]
    joints: tuple[Joint, ...]

    def __post_init__(self) -> None:
        if not 10 <= self.rate <= 500:
            raise ValueError(f"rate must be from 10 to 500 Hz, got {self.rate}")
        _check_topic(self.state_topic)
        if not self.joints:
            raise ValueError("joints must have at least one joint")
        for side in ("policy", "ros"):
            _check_different(f"names of joints ({side})", [getattr(joint, side) for joint in self.joints])
        _check_different("cameras", [camera.policy for camera in self.cameras])
        for joint in self.joints:
            stops = joint.limits.stop_s(1 / self.rate)
            if stops > STANDS_S + 1e-9:
                raise ValueError(
                    f"joint {printable(joint.ros)} takes {stops:.2f} s to stop (speed / acceleration + 2 * "
                    f"acceleration / jerk in whole periods + 2 periods), at most {STANDS_S:g} s: lower its "
                    "speed or raise its jerk"
                )

    @cached_property
    def policy_names(self) -> tuple[str, ...]:
        """The names of the policy's columns."""
        return tuple(joint.policy for joint in self.joints)

    @cached_property
    def ros_names(self) -> tuple[str, ...]:
        """The names of the joints in ROS."""
        return tuple(joint.ros for joint in self.joints)

    @cached_property
    def _lines(self) -> NDArray[np.float64]:
        return np.array([joint.line for joint in self.joints]).T

    def to_ros(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert positions [..., J] of the policy to rad and m."""
        factors, offsets = self._lines
        return values * factors + offsets

    def to_policy(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert positions [..., J] in rad and m to the policy's units."""
        factors, offsets = self._lines
        return (positions - offsets) / factors

    def limits(self, name: str) -> NDArray[np.float64]:
        """Return a limit of all joints: [J], or [J, 2] for `position`."""
        return np.array([getattr(joint.limits, name) for joint in self.joints], np.float64)


def read_contract(path: Path) -> Contract:
    """Read the file. OSError, or ValueError in one line that names the key."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: a contract has at most {MAX_BYTES} bytes")
    try:
        data = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if isinstance(data, dict) and isinstance(data.get("joints"), list):
        joints = [{**OPTIONAL, **each} if isinstance(each, dict) else each for each in data["joints"]]
        data = {**data, "joints": joints}
    return from_dict(Contract, data, str(path))


def check_columns(contract: Contract, names: Sequence[str], units: Sequence[str]) -> None:
    """Raise ValueError unless the actions are the contract's joints, in its units.

    Columns may have any order. An empty unit is unknown and accepted: LeRobot records none.
    """
    expected = {joint.policy: joint.unit for joint in contract.joints}
    _check_names("actions", names, expected, all_of_them=True)
    for name, unit in zip(names, units, strict=True):
        if unit and unit != expected[name]:
            raise ValueError(
                f"action {printable(name)} is in {quoted(unit)}, the contract says {expected[name]}"
            )


def check_policy(contract: Contract, policy: PolicyConfig | None) -> None:
    """Raise ValueError unless the names of an engine fit the contract.

    Compares its actions, their units, its state and its cameras.
    """
    if policy is None:
        raise ValueError("the engine is no policy: it has no actions of joints")
    check_columns(contract, policy.action_space.names, policy.action_space.units)
    if policy.state is not None:
        _check_names("state", policy.state.names, contract.policy_names)
    _check_names(
        "cameras of the contract", [camera.policy for camera in contract.cameras], policy.cameras.names
    )


def _check_names(what: str, names: Sequence[str], expected: Sequence[str], all_of_them: bool = False) -> None:
    unknown = [name for name in names if name not in expected]
    missing = [name for name in expected if name not in names] if all_of_them else []
    if unknown or missing or len(set(names)) < len(names):
        raise ValueError(
            f"{what}: {quoted(', '.join(names))} do not fit {quoted(', '.join(expected))}; "
            f"not there: {quoted(', '.join(unknown + missing) or 'none, one is repeated')}"
        )


def _check_different(what: str, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{what} must be different, repeated: {quoted(', '.join(repeated))}")


def _check_topic(name: str) -> None:
    if not TOPIC.fullmatch(name):
        raise ValueError(f"a topic must be a name of ROS, such as /joint_states, got {quoted(name)}")


def _is_range(values: tuple[float, ...]) -> bool:
    return len(values) == 2 and all(map(math.isfinite, values)) and values[0] < values[1]
