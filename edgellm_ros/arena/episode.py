# SPDX-License-Identifier: Apache-2.0
"""Episodes: a scene, a robot at rest and a command, made from a seed; and the world in which one is played.

Success is a robot at rest within 0.4 m of the named solid's surface. A collision is a robot whose disc
overlaps a solid's or a wall. Everything follows from the seed and the actions; no clock is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_ros.arena import expert
from edgellm_ros.arena.language import Command, sample_command
from edgellm_ros.arena.renderer import render
from edgellm_ros.arena.scene import ROOM_CENTRE, Scene, generate_scene
from edgellm_ros.arena.situation import split_rng
from edgellm_ros.arena.unicycle import DT, HISTORY, ROBOT_RADIUS, State, advance, to_base, wrap
from edgellm_ros.arena.visibility import Sight, sights

SUCCESS_DISTANCE = 0.4  # m from the robot's centre to the target's surface
AT_REST = 0.05  # m/s
TIMEOUT = 40.0  # s of simulated time
DEAD_AHEAD_SHARE = 0.3
NEAREST, FARTHEST = 1.5, 3.5  # m from the start to the target's surface
EVEN = 0.03  # s: in a dead-ahead episode the ways round the left and the right cost the same but for this


class Outcome(str, Enum):
    """How an episode stands."""

    RUNNING = "running"
    SUCCESS = "success"
    COLLISION = "collision"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Episode:
    """Where an episode starts. target: index of the solid that the command names."""

    seed: int
    family: str
    scene: Scene
    start: State
    command: Command
    target: int


@dataclass(frozen=True)
class PlanRecord:
    """One plan of an episode, as a picture of it needs it.

    time in s since the start; state in which the camera frame image [H, W, 3] was taken; text, what the
    robot said; path [T, >=2] of the plan driven and candidates [n, T, >=2] of further samples, in metres of
    the base frame (None: no drive).
    """

    time: float
    state: State
    image: NDArray[np.uint8]
    text: str
    path: NDArray[np.float64] | None = None
    candidates: NDArray[np.float64] | None = None


def make_episode(seed: int, family: str | None = None, split: str = "test") -> Episode:
    """The seed's episode: the target is in view at 1.5 to 3.5 m, and the expert gets there without losing
    sight of it.

    Three in ten are of the family "dead_ahead", with a low obstacle on the straight way that can be passed
    on either side; the rest are "random". Scenes and sentences of split "test" are never those of training.
    """
    if family not in (None, "random", "dead_ahead"):
        raise ValueError(f"family {family!r} is not random or dead_ahead")
    rng = split_rng(seed, split)
    drawn = "dead_ahead" if rng.random() < DEAD_AHEAD_SHARE else "random"
    family = family or drawn
    while True:
        episode = _draw(rng, seed, family, split)
        if episode is not None:
            return episode


def dead_ahead_episode(seed: int, split: str = "test") -> Episode:
    """The seed's episode with an obstacle straight ahead."""
    return make_episode(seed, "dead_ahead", split)


def _draw(rng: Generator, seed: int, family: str, split: str) -> Episode | None:
    scene = generate_scene(rng, family)
    if family == "dead_ahead":
        target, start = 0, State(heading=float(rng.normal(0, 0.015)))
    else:
        target, start = int(rng.integers(sum(not s.is_obstacle for s in scene.solids))), State()
    solid = scene.solids[target]
    if not NEAREST <= solid.surface_distance(start.x, start.y) <= FARTHEST or not _can_be_done(
        scene, start, target, family
    ):
        return None
    alone = sum(s.shape == solid.shape for s in scene.solids) == 1
    color = None if alone and rng.random() < 0.1 else solid.color
    command = sample_command(rng, "go", color, solid.shape, split)
    return Episode(seed, family, scene, start, command, target)


def _can_be_done(scene: Scene, start: State, target: int, family: str) -> bool:
    """True if the start is clear and each way that the expert may take arrives with the target in view
    throughout.
    """
    if scene.clearance(start.x, start.y) < 0.5 or sights(scene, start)[target] is not Sight.SEEN:
        return False
    routes = expert.routes(scene, start, target)
    best = min(r.cost for r in routes)
    likely = [r for r in routes if r.cost < best + 0.3]
    if family == "dead_ahead":
        likely = [r for r in routes if r.cost < best + EVEN]
        blocking = expert.blocking(scene, start, target)
        if not blocking or len({_side(scene, blocking[0], r) for r in likely}) < 2:
            return False
    for route in likely:
        if route.collides or not route.arrives:
            return False
        moving = max(int(np.flatnonzero(route.states[:, 3] > AT_REST)[-1]), 1)
        for index in range(0, moving, 4):
            pose = State(*route.states[index])
            if sights(scene, pose)[target] is not Sight.SEEN:
                return False
    return True


def _side(scene: Scene, obstacle: int, route: expert.Route) -> bool:
    """True if the route passes the obstacle with the obstacle on its right, that is, on the obstacle's
    left.
    """
    solid = scene.solids[obstacle]
    nearest = int(np.hypot(route.states[:, 0] - solid.x, route.states[:, 1] - solid.y).argmin())
    x, y, heading, _ = route.states[nearest]
    return bool(np.cos(heading) * (solid.y - y) - np.sin(heading) * (solid.x - x) < 0)


class World:
    """An episode in play: the robot's state, its way so far, and how things stand. Advances by DT at a
    time.
    """

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.scene = episode.scene
        self.state = episode.start
        self.outcome = Outcome.RUNNING
        self._track = [episode.start]

    @property
    def time(self) -> float:
        """Simulated seconds since the start."""
        return (len(self._track) - 1) * DT

    @property
    def track(self) -> NDArray[np.float64]:
        """All states so far [T+1, 4]: x, y, heading, speed, in the world."""
        return np.stack([s.array() for s in self._track])

    @property
    def done(self) -> bool:
        """True once the outcome is settled; steps after that are errors."""
        return self.outcome is not Outcome.RUNNING

    def step(self, accel: float, curvature: float) -> Outcome:
        """Hold one action (m/s^2, 1/m; clipped to the robot's limits) for DT and say how things stand.

        Raises ValueError on values that are not finite and RuntimeError on an episode that is over.
        """
        if not (math.isfinite(accel) and math.isfinite(curvature)):
            raise ValueError(f"action ({accel}, {curvature}) is not finite")
        if self.done:
            raise RuntimeError(f"the episode is over: {self.outcome.value}")
        before = self.state.array()
        halfway = advance(before, accel, curvature, DT / 2)
        x, y, heading, speed = (float(v) for v in advance(before, accel, curvature))
        self.state = State(x, y, float(wrap(heading)), speed)
        self._track.append(self.state)
        if self.touches(float(halfway[0]), float(halfway[1])) or self.touches(x, y):
            self.outcome = Outcome.COLLISION
        elif self.at_target():
            self.outcome = Outcome.SUCCESS
        elif self.time >= TIMEOUT - 1e-9:
            self.outcome = Outcome.TIMEOUT
        return self.outcome

    def touches(self, x: float, y: float) -> bool:
        """True if a robot at (x, y) would overlap a solid or a wall."""
        room = self.scene.look.room
        walls = min(room[0] - abs(x - ROOM_CENTRE[0]), room[1] - abs(y - ROOM_CENTRE[1]))
        return min(self.scene.clearance(x, y), walls) < ROBOT_RADIUS

    def at_target(self) -> bool:
        """True if the robot is at rest within SUCCESS_DISTANCE of the target."""
        target = self.scene.solids[self.episode.target]
        return (
            self.state.speed < AT_REST
            and target.surface_distance(self.state.x, self.state.y) <= SUCCESS_DISTANCE
        )

    def mean_speed(self) -> float:
        """Mean in m/s over the steps so far in which the robot moved; 0 if it never did."""
        speeds = self.track[:, 3]
        means = (speeds[1:] + speeds[:-1]) / 2
        moving = means > AT_REST
        return float(means[moving].mean()) if moving.any() else 0.0

    def least_clearance(self) -> float:
        """The nearest in m that the robot's edge has come to a solid that is not the target."""
        target = self.episode.target
        return min(self.scene.clearance(x, y, but=target) for x, y in self.track[:, :2]) - ROBOT_RADIUS

    def history(self) -> NDArray[np.float64]:
        """The last 8 poses at DT [8, 3] (x, y, heading) in the current base frame, oldest first, the last
        (0, 0, 0).

        Before the start the robot stood where it started.
        """
        recent = self._track[-HISTORY:]
        recent = [recent[0]] * (HISTORY - len(recent)) + recent
        poses = np.stack([s.array()[:3] for s in recent])
        heading = wrap(poses[:, 2] - self.state.heading)
        return np.concatenate([to_base(self.state, poses[:, :2]), heading[:, None]], 1)

    def camera(self) -> NDArray[np.uint8]:
        """The robot's view now [224, 320, 3] RGB. Noise differs with simulated time and is the same in
        every run.
        """
        return render(self.scene, self.state, np.random.default_rng([self.episode.seed, len(self._track)]))
