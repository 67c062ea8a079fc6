# SPDX-License-Identifier: Apache-2.0
"""The robot's answers: written for training, parsed for scoring.

An answer is short and in lower case. A side is the bearing of a solid's centre from the robot's centre in the
base frame: more than 8 degrees to the left is "on the left", more than 8 degrees to the right is "on the
right", anything between is "straight ahead". A distance is measured from the robot's centre to the solid's
surface and given in steps of half a metre.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_arena.world.scene import COLORS, GREY, SHAPES, Scene
from edgellm_arena.world.unicycle import State, to_base

SIDE_DEGREES = 8.0
SIDE_TOLERANCE = 1.5  # degrees around a boundary in which both words are accepted
DISTANCE_TOLERANCE = 0.40  # m: a distance with a smaller error is accepted
THERE = 0.35  # m to the surface: the robot has arrived

_DISTANCES = {
    0.5: "half a metre",
    1.0: "one metre",
    1.5: "one and a half metres",
    2.0: "two metres",
    2.5: "two and a half metres",
    3.0: "three metres",
    3.5: "three and a half metres",
    4.0: "four metres",
    4.5: "four and a half metres",
    5.0: "five metres",
}
_AHEAD = {"left": "ahead on the left", "right": "ahead on the right", "ahead": "straight ahead"}
_ON = {"left": "on the left", "right": "on the right", "ahead": "straight ahead"}


@dataclass(frozen=True)
class Mention:
    """A solid that an answer names; None for what the answer does not say."""

    color: str | None
    shape: str
    side: str | None = None  # left, right or ahead
    distance: float | None = None  # m


@dataclass(frozen=True)
class Answer:
    """A parsed answer."""

    mentions: tuple[Mention, ...]
    seen: bool = True  # False if the robot says that it does not see the (only) mentioned solid
    way: str | None = None  # clear, blocked or there; None if not said
    stops: bool = False  # True if the robot says that it stops here
    looks: bool = False  # True if the robot says that it looks around


def bearing_degrees(scene: Scene, state: State, index: int) -> float:
    """Return the bearing of a solid's centre from the robot's centre.

    The bearing is in degrees, positive to the left.
    """
    x, y = to_base(state, np.array([scene.solids[index].x, scene.solids[index].y]))
    return float(np.rad2deg(np.arctan2(y, x)))


def side_of(bearing: float) -> str:
    """Return "left", "right" or "ahead" for a bearing in degrees."""
    return "left" if bearing > SIDE_DEGREES else "right" if bearing < -SIDE_DEGREES else "ahead"


def distance_step(distance: float) -> float:
    """Round a distance in m to the nearest half metre from 0.5 to 5."""
    return float(np.clip(np.floor(distance * 2 + 0.5) / 2, 0.5, 5.0))


def where_answer(scene: Scene, state: State, index: int) -> str:
    """Say where a visible solid is.

    Example: "the red box is ahead on the left, about two metres away."
    """
    solid = scene.solids[index]
    side = _AHEAD[side_of(bearing_degrees(scene, state, index))]
    distance = _DISTANCES[distance_step(solid.surface_distance(state.x, state.y))]
    return f"the {solid.name} is {side}, about {distance} away."


def go_answer(scene: Scene, state: State, index: int, blocked: bool, careful: bool = False) -> str:
    """Write the answer to a command to drive to a visible solid.

    `blocked`: an obstacle is in the straight line to the solid. `careful`: the answer says that the robot
    drives carefully.
    """
    solid = scene.solids[index]
    where = where_answer(scene, state, index)
    if arrived(scene, state, index):
        return f"{where} i am there and stop."
    way, drive = "the way is clear.", "i drive there"
    if blocked:
        way, drive = "an obstacle is in the way.", "i drive around it"
    how = " carefully" if careful else ""
    return f"{where} {way} {drive}{how} and stop in front of the {solid.shape}."


def unseen_answer(color: str | None, shape: str, look: bool) -> str:
    """Say that the robot does not see a solid.

    `look`: the robot was told to drive there, so the answer adds that the robot turns to find the solid.
    """
    name = f"{color} {shape}" if color else shape
    return f"i do not see a {name}." + (" i look around." if look else "")


def describe_answer(scene: Scene, state: State, seen: Sequence[int]) -> str:
    """List the visible solids from left to right."""
    if not seen:
        return "i see nothing here."
    bearings = {i: bearing_degrees(scene, state, i) for i in seen}
    parts = [
        f"a {scene.solids[i].name} {_ON[side_of(bearings[i])]}"
        for i in sorted(seen, key=lambda i: -bearings[i])
    ]
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return f"i see {listed}."


STOP_ANSWER = "i stop."


def arrived(scene: Scene, state: State, index: int) -> bool:
    """Return True if the robot is so close to the solid that it only has to stop."""
    return scene.solids[index].surface_distance(state.x, state.y) <= THERE


_THING = rf"(?:({'|'.join((*COLORS, GREY))}) )?({'|'.join((*SHAPES, 'obstacle'))})"
_SIDE = r"(ahead on the left|ahead on the right|on the left|on the right|straight ahead)"
_WHERE = re.compile(rf"the {_THING} is {_SIDE}(?:, about ([a-z ]+?) away)?")
_LISTED = re.compile(rf"a {_THING} {_SIDE}")
_UNSEEN = re.compile(rf"do not see (?:a|the) {_THING}")
_METRES = {words: metres for metres, words in _DISTANCES.items()}


def parse_answer(text: str) -> Answer:
    """Parse an answer; text outside the robot's grammar is skipped."""
    text = " ".join(text.lower().split())
    stops = bool(re.search(r"\bi stop\b|\bthere and stop\b", text))
    unseen = _UNSEEN.search(text)
    if unseen:
        looks = "i look around" in text
        return Answer((Mention(unseen[1], unseen[2]),), seen=False, stops=stops, looks=looks)
    way = None
    for words, value in (("am there", "there"), ("in the way", "blocked"), ("way is clear", "clear")):
        if words in text:
            way = value
            break
    where = _WHERE.search(text)
    if where:
        mention = Mention(where[1], where[2], _side_word(where[3]), _METRES.get(where[4] or ""))
        return Answer((mention,), way=way, stops=stops)
    return Answer(
        tuple(Mention(m[1], m[2], _side_word(m[3])) for m in _LISTED.finditer(text)), way=way, stops=stops
    )


def side_is_true(side: str | None, bearing: float) -> bool:
    """Return True if the word fits the bearing in degrees.

    Within SIDE_TOLERANCE of a boundary both words fit.
    """
    return side in {side_of(bearing), side_of(bearing - SIDE_TOLERANCE), side_of(bearing + SIDE_TOLERANCE)}


def _side_word(words: str) -> str:
    return "left" if "left" in words else "right" if "right" in words else "ahead"
