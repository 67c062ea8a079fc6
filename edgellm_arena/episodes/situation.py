# SPDX-License-Identifier: Apache-2.0
"""Training samples: scene, robot state, history, command, answer and actions.

States vary more than good driving would produce, so that a trained policy recovers from its own errors: the
starts of episodes, moments of drives (some with the robot displaced), any place at any speed, close to a
solid, at the target, with the target beside or behind the robot, which then turns to find it, and the end of
such a search or the drive after it, mostly with a solid in the way. Planning is vectorised over situations,
so situations are made in batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.driving import expert
from edgellm_arena.driving.search import LEFT, RIGHT, collides, search, search_side
from edgellm_arena.words import answers
from edgellm_arena.words.language import SPLITS, Command, sample_command
from edgellm_arena.world.scene import COLORS, ROOM_CENTRE, SHAPES, Scene, generate_scene
from edgellm_arena.world.unicycle import (
    CURVATURE_MAX,
    DT,
    HISTORY,
    HORIZON,
    ROBOT_RADIUS,
    State,
    advance,
    to_base,
    to_world,
    wrap,
)
from edgellm_arena.world.visibility import Sight, sights

FAMILIES = {  # share of each method of placing the robot
    "start": 0.14,
    "dead_ahead": 0.13,
    "drive": 0.28,
    "anywhere": 0.18,
    "beside": 0.07,
    "at_target": 0.07,
    "lost": 0.13,
    "found": 0.0,  # training adds its own share of them (training/data.py)
}
ALIKE = 0.4  # share of training scenes whose solids are easily confused
KINDS = {"go": 0.69, "where": 0.08, "describe": 0.18, "stop": 0.05}
LOST_FROM = 0.6  # rad: least bearing of the target of a lost robot, just inside the picture
TURNING_SPEED = 0.36  # m/s: most lost robots are slower, as on the circle of a search
MARGIN = 0.04  # m that drives keep free beyond the clearance of their manner: a model misses by about as much
FOUND_AT = 0.2, 0.8  # rad: bearing of a target that a search has just found
_BATCH = 48


@dataclass(frozen=True)
class Situation:
    """One moment."""

    scene: Scene
    state: State
    history: NDArray[np.float64]  # positions at DT [8, 2] in the base frame, oldest first, the last (0, 0)
    command: Command
    answer: str
    has_actions: bool
    actions: NDArray[np.float64] | None  # [40, 2]; None if the answer is words only
    target: int | None  # index of the named solid; None if no named solid is visible
    seen: tuple[int, ...]  # indices of the visible solids
    blocked: bool  # whether a solid blocks the straight line to the target
    family: str  # one of FAMILIES
    side: int | None = None  # to which the robot turns to find what it shall go to; None: it does not search

    @property
    def kind(self) -> str:
        """Return go, where, describe or stop."""
        return self.command.kind


@dataclass(frozen=True)
class _Draft:
    """A placed robot, without a command."""

    scene: Scene
    state: State
    history: NDArray[np.float64]
    target: int  # the solid that the robot's place was chosen for
    family: str


def situations(
    seed: int, split: str = "train", manner: expert.Manner = expert.BRISK, family: str | None = None
) -> Iterator[Situation]:
    """Yield situations without end, the same for the same arguments.

    No scene occurs in both splits. `family`: of all situations; None: as FAMILIES shares them.
    """
    rng = split_rng(seed, split)
    while True:
        yield from sample_situations(rng, _BATCH, split, family, manner=manner)


def with_margin(manner: expert.Manner) -> expert.Manner:
    """Return the manner of drives in training: with MARGIN more room."""
    return replace(manner, clearance=manner.clearance + MARGIN)


def sample_situation(
    rng: Generator, split: str = "train", family: str | None = None, kind: str | None = None
) -> Situation:
    """Sample one situation; `sample_situations` is faster for many."""
    return sample_situations(rng, 1, split, family, kind)[0]


def sample_situations(
    rng: Generator,
    count: int,
    split: str = "train",
    family: str | None = None,
    kind: str | None = None,
    manner: expert.Manner = expert.BRISK,
) -> list[Situation]:
    """Sample `count` situations of a split.

    `family`, `kind`: the only family and kind of command, if given. `manner`: how the expert drives.
    ValueError for an unknown family or kind.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    result: list[Situation] = []
    while len(result) < count:
        drafts = _drafts(rng, count - len(result), family, ALIKE if split == "train" else 0.0, manner)
        made = [_speak(rng, draft, split, kind, manner) for draft in drafts]
        result += _with_actions(rng, [s for s in made if s is not None], manner)
    return result


def split_rng(seed: int, split: str) -> Generator:
    """Make the generator of a seed and split.

    ValueError for a negative seed or an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be train or test, got {split!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return np.random.default_rng([zlib.crc32(split.encode()), seed])


def _drafts(
    rng: Generator, count: int, family: str | None, alike: float, manner: expert.Manner
) -> list[_Draft]:
    """Place up to `count` robots inside the room that touch nothing."""
    drafts: list[_Draft] = []
    on_the_way: list[_Draft] = []
    for _ in range(count):
        kind = family or str(rng.choice(list(FAMILIES), p=list(FAMILIES.values())))
        ahead = kind == "dead_ahead" or (kind == "drive" and rng.random() < 0.3)
        scene = generate_scene(rng, "dead_ahead" if ahead else "random", alike)
        target = 0 if ahead else int(rng.integers(sum(not s.is_obstacle for s in scene.solids)))
        if kind == "drive" or (kind == "dead_ahead" and rng.random() < 0.4):
            state = _start(rng, scene, target, ahead)
            if state is not None:
                state = replace(state, speed=0.0)
                on_the_way.append(_Draft(scene, state, np.zeros((HISTORY, 2)), target, kind))
            continue
        state = (
            _start(rng, scene, target, ahead)
            if kind in ("start", "dead_ahead")
            else _place(rng, scene, target, kind)
        )
        if state is not None:
            toward = LEFT if answers.bearing_degrees(scene, state, target) > 0 else RIGHT
            draft = _Draft(scene, state, _past(rng, state, kind, toward), target, kind)
            (on_the_way if kind == "found" and rng.random() < 0.5 else drafts).append(draft)
    drafts += _drive_on(rng, on_the_way, manner)
    return [d for d in drafts if _is_free(d.scene, d.state)]


def _is_free(scene: Scene, state: State) -> bool:
    inside = (
        abs(state.x - ROOM_CENTRE[0]) < scene.look.room[0] - 0.4
        and abs(state.y - ROOM_CENTRE[1]) < scene.look.room[1] - 0.4
    )
    return inside and scene.clearance(state.x, state.y) > ROBOT_RADIUS + 0.01


def _start(rng: Generator, scene: Scene, target: int, ahead: bool) -> State | None:
    """Place a robot near the origin, at rest or slow, as at the start of an episode."""
    solid = scene.solids[target]
    speed = 0.0 if rng.random() < 0.75 else float(rng.uniform(0, 0.5))
    if ahead:
        return State(
            float(rng.uniform(-0.1, 0.2)), float(rng.normal(0, 0.02)), float(rng.normal(0, 0.05)), speed
        )
    x, y = float(rng.uniform(-0.4, 0.4)), float(rng.uniform(-0.4, 0.4))
    bearing = np.arctan2(solid.y - y, solid.x - x)
    off = float(np.clip(rng.normal(0, 0.35), -0.65, 0.65))
    return State(x, y, float(bearing - off), speed) if solid.surface_distance(x, y) > 0.5 else None


def _place(rng: Generator, scene: Scene, target: int, family: str) -> State | None:
    """Place a robot anywhere, with the target roughly in front of it.

    The target of a lost robot is beside or behind it. A robot that has found its target has another solid in
    the way.
    """
    solid = scene.solids[target]
    speed = 0.0 if rng.random() < 0.3 else float(rng.uniform(0, 0.8))
    around = float(rng.uniform(-np.pi, np.pi)) if rng.random() < 0.5 else float(rng.normal(np.pi, 0.6))
    off = float(np.clip(rng.normal(0, 0.45), -0.9, 0.9))
    if family == "at_target":
        away = solid.radius + float(rng.uniform(0.20, 0.5))
        speed = 0.0 if rng.random() < 0.6 else float(rng.uniform(0, 1.1 * (away - solid.radius - 0.15)))
        x, y = solid.x + away * np.cos(around), solid.y + away * np.sin(around)
    elif family in ("beside", "found"):
        others = [s for i, s in enumerate(scene.solids) if i != target]
        if not others:
            return None
        near = others[int(rng.integers(len(others)))]
        away = near.radius + float(rng.uniform(0.17, 0.5))
        if family == "found":
            away = near.radius + float(rng.uniform(0.3, 1.4))
            around = float(np.arctan2(near.y - solid.y, near.x - solid.x) + rng.normal(0, 0.25))
        x, y = near.x + away * np.cos(around), near.y + away * np.sin(around)
        speed = min(speed, 0.6)
    elif family == "lost" and rng.random() < 0.5:
        x, y = rng.uniform(-0.8, 0.8, 2)
    else:
        away = solid.radius + 0.25 + 3.55 * float(rng.beta(1.2, 1.6))
        x, y = solid.x + away * np.cos(around), solid.y + away * np.sin(around)
    if family == "lost":
        off = float(rng.uniform(LOST_FROM, np.pi)) * (1 if rng.random() < 0.5 else -1)
        speed = speed if rng.random() < 0.2 else min(speed, float(rng.uniform(0, TURNING_SPEED)))
    if family == "found":
        off = float(rng.uniform(*FOUND_AT)) * (1 if rng.random() < 0.5 else -1)
        speed = float(rng.uniform(0.2, TURNING_SPEED + 0.04))
    bearing = np.arctan2(solid.y - y, solid.x - x)
    return State(float(x), float(y), float(wrap(bearing - off)), speed)


def _past(rng: Generator, state: State, family: str, toward: int) -> NDArray[np.float64]:
    """Make a plausible history [8, 2] that ends in the state.

    Acceleration and curvature are constant. Most lost robots are turning already; those that have found their
    target were turning `toward` it.
    """
    accel = float(rng.uniform(-1.0, 0.8)) if rng.random() < 0.6 else 0.0
    curvature = float(np.clip(rng.normal(0, 0.8), -2.2, 2.2)) if rng.random() < 0.7 else 0.0
    if family == "lost" and rng.random() < 0.75:
        accel = float(rng.uniform(0.0, 0.9)) if rng.random() < 0.4 else 0.0
        curvature = CURVATURE_MAX * float(rng.uniform(0.6, 1.0)) * (1 if rng.random() < 0.5 else -1)
    if family == "found":
        accel, curvature = float(rng.normal(0, 0.05)), CURVATURE_MAX * float(rng.uniform(0.7, 1.0)) * toward
    if state.speed == 0 and rng.random() < 0.7:
        accel = 0.0
    track = [state.array()]
    for _ in range(HISTORY - 1):
        track.append(advance(track[-1], accel, curvature, -DT))
    return to_base(state, np.stack(track[::-1])[:, :2])


def _drive_on(rng: Generator, drafts: list[_Draft], manner: expert.Manner) -> list[_Draft]:
    """Let the expert drive for a while from each start; displace some robots slightly."""
    if not drafts:
        return []
    found = expert.routes_batch(
        [d.scene for d in drafts],
        [d.state for d in drafts],
        [d.target for d in drafts],
        with_margin(manner),
    )
    result = []
    for draft, routes in zip(drafts, found, strict=True):
        route = expert.choose(routes, rng)
        rest = np.flatnonzero(route.states[5:, 3] < 1e-3)
        length = 5 + int(rest[0]) if len(rest) else len(route.states) - 1
        now = min(int(rng.integers(0, length + 3)), len(route.states) - 1)
        before = State(*route.states[now])
        begun = to_world(draft.state, draft.history[:-1])
        history = to_base(before, np.concatenate([begun, route.states[: now + 1, :2]])[-HISTORY:])
        state = before
        if rng.random() < 0.6:
            push = rng.normal(0, (0.03, 0.05))
            x, y = to_world(before, push)
            turn = float(rng.normal(0, np.deg2rad(6)))
            state = State(float(x), float(y), float(wrap(before.heading + turn)), before.speed)
        result.append(_Draft(draft.scene, state, history, draft.target, draft.family))
    return result


def _speak(
    rng: Generator, draft: _Draft, split: str, kind: str | None, manner: expert.Manner
) -> Situation | None:
    """Give the draft a command and its true answer.

    Returns None if too little is clearly visible.
    """
    scene, state = draft.scene, draft.state
    sight = sights(scene, state)
    seen = tuple(i for i, s in enumerate(sight) if s is Sight.SEEN)
    kind = kind or str(rng.choice(list(KINDS), p=list(KINDS.values())))
    if kind in ("describe", "stop"):
        if kind == "describe" and Sight.UNCLEAR in sight:
            return None
        answer = answers.STOP_ANSWER if kind == "stop" else answers.describe_answer(scene, state, seen)
        command = sample_command(rng, kind, split=split)
        return Situation(
            scene,
            state,
            draft.history,
            command,
            answer,
            kind == "stop",
            None,
            None,
            seen,
            False,
            draft.family,
        )
    absent = rng.random() < (0.07 if kind == "go" else 0.25)
    if absent:
        color, shape = _absent(rng, scene)
        unseen = True
    else:
        if sight[draft.target] is Sight.UNCLEAR and (split == "test" or kind != "go"):
            return None  # in training an occluded target is driven to: it was visible earlier
        unseen = sight[draft.target] is Sight.UNSEEN
        if unseen and draft.family != "lost" and rng.random() < 0.5:
            return None
        solid = scene.solids[draft.target]
        color, shape = solid.color, solid.shape
    target = None if unseen else draft.target
    if rng.random() < 0.15 and _is_only(scene, sight, shape, target):
        color = None
    command = sample_command(rng, kind, color, shape, split)
    blocked, side = False, None
    if target is None:
        answer = answers.unseen_answer(color, shape, look=kind == "go")
        if kind == "go":
            bearing = None if absent else answers.bearing_degrees(scene, state, draft.target)
            side = search_side(draft.history, bearing, rng)
    elif kind == "where":
        answer = answers.where_answer(scene, state, target)
    else:
        blocked = bool(expert.blocking(scene, state, target, manner))
        answer = answers.go_answer(scene, state, target, blocked, manner.careful)
    return Situation(
        scene,
        state,
        draft.history,
        command,
        answer,
        kind == "go",
        None,
        target,
        seen,
        blocked,
        draft.family,
        side,
    )


def _absent(rng: Generator, scene: Scene) -> tuple[str, str]:
    """Choose colour and shape of a solid that is not in the scene.

    The solid often shares its colour or its shape with one in the scene.
    """
    have = {(s.color, s.shape) for s in scene.solids}
    missing = [(c, s) for c in COLORS for s in SHAPES if (c, s) not in have]
    if rng.random() < 0.6:
        colors, shapes = {c for c, _ in have}, {s for _, s in have}
        missing = [m for m in missing if m[0] in colors or m[1] in shapes] or missing
    return missing[int(rng.integers(len(missing)))]


def _is_only(scene: Scene, sight: list[Sight], shape: str, target: int | None) -> bool:
    """Return True if the shape alone identifies the solid, or no visible solid has it."""
    return not any(
        s.shape == shape and sight[i] is not Sight.UNSEEN and i != target for i, s in enumerate(scene.solids)
    )


def _with_actions(rng: Generator, made: list[Situation], manner: expert.Manner) -> list[Situation]:
    """Add the expert's actions, in order; drop situations without a solution."""
    going = [s for s in made if s.has_actions and s.target is not None]
    found = iter(
        expert.routes_batch(
            [s.scene for s in going],
            [s.state for s in going],
            [s.target for s in going],
            with_margin(manner),
        )
        if going
        else ()
    )
    result = []
    for s in made:
        actions = expert.brake(s.state.speed) if s.has_actions else None
        if s.has_actions and s.target is not None:
            route = expert.choose(next(found), rng)
            if route.collides or not route.arrives:
                continue
            actions = route.actions[:HORIZON]
        elif s.side is not None:
            actions = search(s.scene, s.state, s.side, manner)
            if collides(s.scene, s.state, actions):
                continue
        result.append(replace(s, actions=actions))
    return result
