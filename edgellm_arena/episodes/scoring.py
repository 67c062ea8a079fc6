# SPDX-License-Identifier: Apache-2.0
"""Checks whether an answer is true of the picture.

Each part of the answer is compared with the scene, not with a reference wording.
"""

from __future__ import annotations

import numpy as np

from edgellm_arena.episodes.episode import Episode
from edgellm_arena.episodes.situation import Situation
from edgellm_arena.words import answers
from edgellm_arena.words.answers import DISTANCE_TOLERANCE, Answer, Mention
from edgellm_arena.words.german import to_english
from edgellm_arena.world.scene import Scene


def check(text: str, situation: Situation) -> dict[str, bool]:
    """Check the parts of an answer that the situation calls for.

    Keys for go and where: "seen" (the answer is right about whether the solid is in view), "color", "shape",
    and for a solid in view "side" and "distance"; for go also "way" (clear, blocked or there), and for a
    solid out of view "looks" (the robot says that it looks around). Keys for
    describe: "count", "color", "shape", "side". Key for stop: "stops". Within 1.5 degrees of a boundary both
    sides are right; a distance may be off by 0.4 m.
    """
    answer = answers.parse_answer(text)
    if situation.kind == "stop":
        return {"stops": answer.stops and not answer.mentions}
    if situation.kind == "describe":
        return _check_description(answer, situation)
    command, target = situation.command, situation.target
    mention = answer.mentions[0] if len(answer.mentions) == 1 else Mention(None, "")
    result = {"seen": bool(answer.mentions) and answer.seen == (target is not None)}
    if target is None:
        result |= {"color": mention.color == command.color, "shape": mention.shape == command.shape}
        return result | ({"looks": answer.looks} if situation.kind == "go" else {})
    result |= _check_mention(mention, situation, target)
    if situation.kind == "go":
        result["way"] = answer.way == _way(situation, target)
    return result


def names_target(text: str, episode: Episode) -> bool:
    """Return True if an answer names the episode's target and no other solid.

    The answer may be in English or German, and the solid need not be in view.
    """
    answer = answers.parse_answer(to_english(text))
    if len(answer.mentions) != 1:
        return False
    (mention,), solid = answer.mentions, episode.scene.solids[episode.target]
    colors = {solid.color} if answer.seen else {solid.color, episode.command.color}
    return mention.shape == solid.shape and mention.color in colors


def is_true(text: str, situation: Situation) -> bool:
    """Return True if every part of the answer is true."""
    return all(check(text, situation).values())


def _way(situation: Situation, target: int) -> str:
    if answers.arrived(situation.scene, situation.state, target):
        return "there"
    return "blocked" if situation.blocked else "clear"


def _check_mention(mention: Mention, situation: Situation, index: int) -> dict[str, bool]:
    scene, state = situation.scene, situation.state
    solid = scene.solids[index]
    distance = solid.surface_distance(state.x, state.y)
    said = mention.distance
    return {
        "color": mention.color == solid.color,
        "shape": mention.shape == solid.shape,
        "side": answers.side_is_true(mention.side, answers.bearing_degrees(scene, state, index)),
        "distance": said is not None and abs(said - np.clip(distance, 0.5, 5.0)) < DISTANCE_TOLERANCE,
    }


def _check_description(answer: Answer, situation: Situation) -> dict[str, bool]:
    """Match the mentions with the visible solids, the best fitting side first."""
    scene, left = situation.scene, list(answer.mentions)
    names = sorted(_called(scene, i) for i in situation.seen)
    said = sorted((m.color or "", m.shape) for m in left)
    side = len(said) == len(names)
    for index in situation.seen:
        bearing = answers.bearing_degrees(scene, situation.state, index)
        fits = [m for m in left if (m.color or "", m.shape) == _called(scene, index)]
        fits = [m for m in fits if answers.side_is_true(m.side, bearing)]
        side &= bool(fits)
        if fits:
            left.remove(fits[0])
    return {
        "count": len(said) == len(names),
        "color": sorted(c for c, _ in said) == sorted(c for c, _ in names),
        "shape": sorted(s for _, s in said) == sorted(s for _, s in names),
        "side": side,
    }


def _called(scene: Scene, index: int) -> tuple[str, str]:
    solid = scene.solids[index]
    return solid.color, "obstacle" if solid.is_obstacle else solid.shape
