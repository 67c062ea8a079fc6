# SPDX-License-Identifier: Apache-2.0
"""Episodes (scene, start and command from a seed) and the world that runs them.

An episode succeeds if the robot is at rest within 0.4 m of the surface of the named solid. In a collision the
robot's disc overlaps the disc of a solid or a wall. Everything follows from the seed and the actions; no
clock is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.driving import expert
from edgellm_arena.driving.search import LEFT, RIGHT, find
from edgellm_arena.episodes.situation import split_rng
from edgellm_arena.words.language import Command, sample_command
from edgellm_arena.world.renderer import render
from edgellm_arena.world.scene import ROOM_CENTRE, Scene, generate_scene
from edgellm_arena.world.unicycle import DT, HISTORY, ROBOT_RADIUS, State, advance, to_base, wrap
from edgellm_arena.world.visibility import Sight, sights

EPISODE_SEEDS = 1000  # episodes of one seed of a demo or benchmark; the next seed has other episodes
SUCCESS_DISTANCE = 0.4  # m from the robot's centre to the target's surface
AT_REST = 0.05  # m/s
OUT_OF_SIGHT = "out_of_sight"
EPISODE_FAMILIES = ("random", "dead_ahead", OUT_OF_SIGHT)
TIMEOUT = 40.0  # s of simulated time
DEAD_AHEAD_SHARE = 0.3
NEAREST, FARTHEST = 1.5, 3.5  # m from the start to the target's surface
EVEN = 0.03  # s: largest difference in cost of the left and the right route in a dead-ahead episode


class Outcome(str, Enum):
    """State of an episode."""

    RUNNING = "running"
    SUCCESS = "success"
    COLLISION = "collision"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Episode:
    """Start of an episode."""

    seed: int
    family: str
    scene: Scene
    start: State
    command: Command
    target: int  # index of the solid that the command names


@dataclass(frozen=True)
class PlanRecord:
    """One plan of an episode, with the data that a picture of the episode needs."""

    time: float  # s since the start
    state: State  # when the camera frame was taken
    image: NDArray[np.uint8]  # the camera frame [H, W, 3]
    text: str  # the robot's answer
    path: NDArray[np.float64] | None = None  # of the plan [T, >=2], m in the base frame; None: no drive
    candidates: NDArray[np.float64] | None = None  # paths of further samples [n, T, >=2]


def make_episode(seed: int, family: str | None = None, split: str = "test") -> Episode:
    """Make the episode of a seed.

    The target is at a distance of 1.5 to 3.5 m. Without a family, it is in view, and the expert reaches it
    without losing sight of it; three in ten of these episodes are of the family "dead_ahead": a low obstacle
    blocks the straight line and can be passed on either side. The others are "random". In an episode of the
    family "out_of_sight" the robot looks elsewhere at the start, and the expert finds the target by turning
    to either side. Scenes and sentences of the split "test" never occur in training. ValueError for an
    unknown family or split, or a negative seed.
    """
    if family not in (None, *EPISODE_FAMILIES):
        raise ValueError(f"family must be one of {', '.join(EPISODE_FAMILIES)}, got {family!r}")
    rng = split_rng(seed, split)
    sampled = "dead_ahead" if rng.random() < DEAD_AHEAD_SHARE else "random"
    family = family or sampled
    while True:
        episode = _sample(rng, seed, family, split)
        if episode is not None:
            return episode


def dead_ahead_episode(seed: int, split: str = "test") -> Episode:
    """Make the episode of a seed with an obstacle straight ahead."""
    return make_episode(seed, "dead_ahead", split)


def _sample(rng: Generator, seed: int, family: str, split: str) -> Episode | None:
    scene = generate_scene(rng, "random" if family == OUT_OF_SIGHT else family)
    if family == "dead_ahead":
        target, start = 0, State(heading=float(rng.normal(0, 0.015)))
    else:
        target, start = int(rng.integers(sum(not s.is_obstacle for s in scene.solids))), State()
    if family == OUT_OF_SIGHT:
        start = State(heading=float(rng.uniform(-np.pi, np.pi)))
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
    """Check that the start is clear and that the expert reaches the target.

    The expert must reach the target on every likely route. The target must stay in view on every route, in an
    episode "out_of_sight" once it is found.
    """
    wanted = Sight.UNSEEN if family == OUT_OF_SIGHT else Sight.SEEN
    if scene.clearance(start.x, start.y) < 0.5 or sights(scene, start)[target] is not wanted:
        return False
    if family == OUT_OF_SIGHT:
        found = [find(scene, start, target, side) for side in (LEFT, RIGHT)]
        return all(state is not None and _stays_in_view(scene, state, target, family) for state in found)
    return _stays_in_view(scene, start, target, family)


def _stays_in_view(scene: Scene, start: State, target: int, family: str) -> bool:
    """Check that every likely route reaches the target and keeps it in view."""
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
    """Return True if the route passes the obstacle on the obstacle's left."""
    solid = scene.solids[obstacle]
    nearest = int(np.hypot(route.states[:, 0] - solid.x, route.states[:, 1] - solid.y).argmin())
    x, y, heading, _ = route.states[nearest]
    return bool(np.cos(heading) * (solid.y - y) - np.sin(heading) * (solid.x - x) < 0)


class World:
    """A running episode: the robot's state, its track so far, and the outcome.

    The world advances in steps of DT.
    """

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.scene = episode.scene
        self.state = episode.start
        self.outcome = Outcome.RUNNING
        self._track = [episode.start]

    @property
    def time(self) -> float:
        """Return simulated seconds since the start."""
        return (len(self._track) - 1) * DT

    @property
    def track(self) -> NDArray[np.float64]:
        """Return all states so far [T+1, 4]: x, y, heading, speed in the world frame."""
        return np.stack([s.array() for s in self._track])

    @property
    def done(self) -> bool:
        """Return True once the outcome is settled; `step` then raises an error."""
        return self.outcome is not Outcome.RUNNING

    def step(self, accel: float, curvature: float) -> Outcome:
        """Hold one action (m/s^2, 1/m) for DT and return the outcome.

        The action is clipped to the robot's limits. ValueError for values that are not finite, RuntimeError
        if the episode is over.
        """
        if not (math.isfinite(accel) and math.isfinite(curvature)):
            raise ValueError(f"accel and curvature must be finite, got {accel} and {curvature}")
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
        """Return True if a robot at (x, y) would overlap a solid or a wall."""
        room = self.scene.look.room
        walls = min(room[0] - abs(x - ROOM_CENTRE[0]), room[1] - abs(y - ROOM_CENTRE[1]))
        return min(self.scene.clearance(x, y), walls) < ROBOT_RADIUS

    def at_target(self) -> bool:
        """Return True if the robot is at rest within SUCCESS_DISTANCE of the target."""
        target = self.scene.solids[self.episode.target]
        return (
            self.state.speed < AT_REST
            and target.surface_distance(self.state.x, self.state.y) <= SUCCESS_DISTANCE
        )

    def mean_speed(self) -> float:
        """Compute the mean speed in m/s over the steps in which the robot moved.

        The speed is 0 if the robot never moved.
        """
        speeds = self.track[:, 3]
        means = (speeds[1:] + speeds[:-1]) / 2
        moving = means > AT_REST
        return float(means[moving].mean()) if moving.any() else 0.0

    def least_clearance(self) -> float:
        """Compute the smallest distance in m between the robot's edge and any other solid.

        The target is left out.
        """
        target = self.episode.target
        return min(self.scene.clearance(x, y, but=target) for x, y in self.track[:, :2]) - ROBOT_RADIUS

    def history(self) -> NDArray[np.float64]:
        """Return the last 8 poses [8, 3] (x, y, heading) at intervals of DT.

        Oldest first, in the current base frame, so the last pose is (0, 0, 0). Poses before the start equal
        the start.
        """
        recent = self._track[-HISTORY:]
        recent = [recent[0]] * (HISTORY - len(recent)) + recent
        poses = np.stack([s.array()[:3] for s in recent])
        heading = wrap(poses[:, 2] - self.state.heading)
        return np.concatenate([to_base(self.state, poses[:, :2]), heading[:, None]], 1)

    def camera(self) -> NDArray[np.uint8]:
        """Render the robot's current view [224, 320, 3] RGB.

        Noise differs with simulated time and is the same in every run.
        """
        return render(self.scene, self.state, np.random.default_rng([self.episode.seed, len(self._track)]))
