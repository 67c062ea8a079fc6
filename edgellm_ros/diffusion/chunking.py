# SPDX-License-Identifier: Apache-2.0
"""Real-time chunking: a chunk of actions that continues the one before it.

A robot executes the previous chunk while the next one is computed. Its first `delay` actions have been
executed from the previous chunk by then, so the next chunk should agree with them. All forms change an Euler
step of size h from x += h * v to

    x += h * (strength * v + pull * (previous - x))

with a strength and a pull for each action and step, so that one kernel serves them all:

- guided (arXiv 2506.07339, test-time): the velocity is corrected towards the previous chunk by the error of
  the actions that it leads to, x + (1 - t) v. The published method multiplies the error with the transposed
  Jacobian of these actions; here, as in LeRobot, the identity takes its place, so no gradient is needed.
- frozen (GR00T N1.7): the actions begin as those of the previous chunk; the first ones stay, and the velocity
  of the others rises along the chunk.
- trained (arXiv 2512.05964): the first actions are those of the previous chunk, with the time of finished
  actions; for checkpoints that have learned this. The velocity of following ones may be corrected as in
  guided.

docs/real_time_chunking.md explains the choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgellm_ros.diffusion.action_head import HeadConfig
from edgellm_ros.echo import quoted

GUIDED, FROZEN, TRAINED = FORMS = ("guided", "frozen", "trained")
SCHEDULES = ("linear", "exp", "ones", "zeros")
RAMP_RATE = 6.0  # of the frozen form, as in GR00T N1.7
MAX_GUIDANCE_WEIGHT = 1000.0


@dataclass(frozen=True, eq=False)
class ChunkCondition:
    """The previous chunk of actions, which the next one continues.

    With `executed` actions of the previous chunk before the time of the new observation, its action
    `executed + i` is at the place of the new chunk's action i. ValueError names the field, its range and the
    value.
    """

    actions: np.ndarray  # the previous chunk [T, A] in physical units
    executed: int  # its actions before the time of the new observation, from 0
    delay: int  # actions that are executed until the new chunk arrives, from 0; they stay as they are
    form: str = GUIDED  # "guided", "frozen" or "trained"
    # New actions under the previous chunk's influence; None = all that are left, with "trained" `delay`.
    horizon: int | None = None
    schedule: str = "linear"  # falling weights after `delay`: "linear", "exp", "ones" or "zeros"
    max_guidance_weight: float | None = None  # their limit, up to 1000; None = number of Euler steps

    def __post_init__(self) -> None:
        try:
            actions = np.array(self.actions, np.float32)
        except (TypeError, ValueError):
            raise ValueError(f"actions must be an array of numbers, got {quoted(self.actions)}") from None
        if actions.ndim != 2:
            raise ValueError(f"actions must have shape [T, A], got {list(actions.shape)}")
        if not np.isfinite(actions).all():
            raise ValueError("actions has values that are not finite")
        object.__setattr__(self, "actions", actions)
        for name in ("executed", "delay"):
            _check_count(name, getattr(self, name), 0)
        if self.horizon is not None:
            _check_count("horizon", self.horizon, 1)
        for name, allowed in (("form", FORMS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in allowed:
                value = quoted(getattr(self, name))
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value}")
        weight = self.max_guidance_weight
        if weight is not None and (
            isinstance(weight, bool)
            or not isinstance(weight, (int, float, np.number))
            or not 0 < weight <= MAX_GUIDANCE_WEIGHT
        ):
            raise ValueError(
                f"max_guidance_weight must be a number above 0 and up to {MAX_GUIDANCE_WEIGHT:g}, "
                f"got {quoted(weight)}"
            )

    @property
    def left(self) -> int:
        """Number of actions that are left of the previous chunk."""
        return len(self.actions) - self.executed

    @property
    def end(self) -> int:
        """First new action that the previous chunk has no influence on."""
        if self.horizon is not None:
            return self.horizon
        return self.delay if self.form == TRAINED else self.left

    @property
    def unchanged(self) -> np.ndarray:
        """The first actions [n, A] of the new chunk, as in the previous one.

        The actions are the same to the bit.
        """
        count = 0 if self.form == GUIDED else self.delay
        return self.actions[self.executed : self.executed + count]

    def check(self, config: HeadConfig) -> None:
        """Check the condition against an engine's action head. ValueError."""
        if not config.has_flow:
            raise ValueError("this engine's actions come from no flow that a previous chunk could steer")
        space = config.action_space
        if self.actions.shape != (space.horizon, space.dim):
            raise ValueError(
                f"actions must have shape [{space.horizon}, {space.dim}], got {list(self.actions.shape)}"
            )
        if self.left < 1:
            raise ValueError(
                f"executed must be below {space.horizon}, the actions of a chunk, got {self.executed}"
            )
        if self.delay > self.left:
            raise ValueError(
                f"delay must be at most {self.left}, the actions that are left of the previous chunk "
                f"({space.horizon} - executed), got {self.delay}"
            )
        if not self.delay <= self.end <= self.left:
            raise ValueError(
                f"horizon must be from {max(self.delay, 1)} (delay) to {self.left} ({space.horizon} - "
                f"executed), got {self.horizon}"
            )
        if self.form != TRAINED:
            return
        if not config.rtc_max_delay:
            raise ValueError(
                "form must be guided or frozen: the checkpoint was not trained to continue chunks "
                "(rtc_max_delay in its action_expert/config.json), got 'trained'"
            )
        if self.delay > config.rtc_max_delay:
            raise ValueError(
                f"delay must be at most {config.rtc_max_delay}, for which the checkpoint was trained "
                f"(rtc_max_delay), got {self.delay}"
            )


def _check_count(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {quoted(value)}")


def prefix_weights(start: int, end: int, total: int, schedule: str) -> np.ndarray:
    """Return the weights [total] of a previous chunk.

    Weights are 1 before `start`, 0 from `end`, and fall between, as in the reference implementation of arXiv
    2506.07339.
    """
    start, places = min(start, end), np.arange(total)
    if schedule == "ones":
        weights = np.ones(total)
    elif schedule == "zeros":
        weights = (places < start).astype(np.float64)
    else:
        weights = np.clip((end - places) / (end - start + 1), 0.0, 1.0)
        if schedule == "exp":
            weights = weights * np.expm1(weights) / (math.e - 1)
    return np.where(places < end, weights, 0.0)


def velocity_ramp(start: int, end: int, total: int) -> np.ndarray:
    """Return the velocity's factors [total] of the frozen form.

    Factors are 0 before `start` and 1 from `end`.
    """
    factors = np.ones(total)
    places = np.linspace(0.0, 1.0, end - start + 2)[1:-1]
    factors[start:end] = np.expm1(-RAMP_RATE * places) / np.expm1(-RAMP_RATE)
    factors[:start] = 0.0
    return factors


def guidance(time: float, limit: float) -> float:
    """Return the guided form's weight at a flow time from 0 (noise) to below 1."""
    if time <= 0.0:
        return limit
    return min(limit, (time**2 + (1 - time) ** 2) / (time * (1 - time)))


@dataclass(frozen=True, eq=False)
class ConditionedRun:
    """What the Euler steps of one run need of a condition; rows are actions."""

    previous: np.ndarray  # float32 [T, A], normalised, aligned with the new rows; 0 after its end
    kept: int  # first rows that begin as the previous ones instead of noise
    clean: int  # first rows whose time is 1, that of finished actions
    strength: np.ndarray  # float32 [steps, T], the velocity's factors
    pull: np.ndarray  # float32 [steps, T], factors of the distance to the previous rows

    def times(self, step: int) -> np.ndarray:
        """Return the flow times [T] of the rows in a step."""
        count, rows = self.strength.shape
        return np.where(np.arange(rows) < self.clean, 1.0, step / count).astype(np.float32)

    def factors(self, first: int, last: int) -> np.ndarray:
        """Return strength, pull and the next times: float32 [steps, 3, T].

        The steps are `first` to `last` - 1; the next times are those of the steps after them.
        """
        steps = range(first, last)
        next_times = np.stack([self.times(step + 1) for step in steps])
        return np.stack([self.strength[first:last], self.pull[first:last], next_times], axis=1)


def conditioned_run(condition: ChunkCondition, left: np.ndarray, steps: int, total: int) -> ConditionedRun:
    """Compute what a run of Euler steps needs.

    left: what is left of the previous chunk in the head's values, [condition.left, A]; total: actions that
    the head computes. The condition has been checked.
    """
    previous = np.zeros((total, left.shape[1]), np.float32)
    previous[: len(left)] = left
    delay, end = condition.delay, condition.end
    strength, pull = np.ones((steps, total)), np.zeros((steps, total))
    kept = clean = 0
    if condition.form == FROZEN:
        kept, strength[:] = end, velocity_ramp(delay, end, total)
    else:
        limit = condition.max_guidance_weight or float(steps)
        weights = prefix_weights(delay, end, total, condition.schedule)
        for step in range(steps):
            time = step / steps
            pull[step] = guidance(time, limit) * weights
            strength[step] = 1.0 - (1.0 - time) * pull[step]
    if condition.form == TRAINED:
        kept = clean = delay
        strength[:, :delay] = pull[:, :delay] = 0.0
    return ConditionedRun(previous, kept, clean, strength.astype(np.float32), pull.astype(np.float32))
