# SPDX-License-Identifier: Apache-2.0
"""Draws an episode as one picture: frames with planned paths, answers and the map.

All images are RGB and drawn with OpenCV.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from edgellm_arena.episodes.episode import Outcome, PlanRecord, World
from edgellm_arena.episodes.map_drawing import draw_map
from edgellm_arena.world.camera import CAMERA, Camera
from edgellm_arena.world.renderer import identify
from edgellm_arena.world.unicycle import ROBOT_RADIUS
from edgellm_ros.io.canvas import (
    BAD,
    DOUBTFUL,
    FAINT,
    GOOD,
    INK,
    PAPER,
    Image,
    badge,
    rounded,
    text,
    write_png,
)

NEAR_PAINT, FAR_PAINT, OTHER_PAINT = (0, 214, 196), (255, 200, 40), (255, 255, 255)
_OUTCOMES = {
    Outcome.SUCCESS: ("reached", GOOD),
    Outcome.COLLISION: ("collision", BAD),
    Outcome.TIMEOUT: ("timed out", DOUBTFUL),
    Outcome.RUNNING: ("not finished", DOUBTFUL),
}
_MARGIN, _HEADER, _MAP = 28, 96, (600, 816)
_FRAME = (452, 316)
_CAPTION = 84
_KEYS = 4


def save_episode(file: str | Path, world: World, plans: Sequence[PlanRecord]) -> None:
    """Write the episode's picture as PNG; OSError if the file cannot be written."""
    write_png(file, draw_episode(world, plans))


def draw_episode(world: World, plans: Sequence[PlanRecord]) -> Image:
    """Draw the picture [H, W, 3] of an episode; ValueError without any plan."""
    if not plans:
        raise ValueError("cannot draw an episode without a plan: expected at least one, got none")
    width = _MAP[0] + 2 * _FRAME[0] + 4 * _MARGIN
    rows = 2 * (_FRAME[1] + _CAPTION) + 16
    canvas = np.full((_HEADER + rows + 8, width, 3), PAPER, np.uint8)
    _header(canvas, world, len(plans))
    keys = _key_plans(len(plans))
    canvas[_HEADER : _HEADER + _MAP[1], _MARGIN : _MARGIN + _MAP[0]] = draw_map(world, plans, keys, _MAP)
    for cell, index in enumerate(keys):
        left = _MAP[0] + 2 * _MARGIN + (cell % 2) * (_FRAME[0] + _MARGIN)
        top = _HEADER + (cell // 2) * (_FRAME[1] + _CAPTION + 16)
        _frame(canvas, left, top, cell + 1, plans[index], world)
    return canvas


def overlay(
    image: Image,
    path: NDArray[np.float64],
    others: Sequence[NDArray[np.float64]] = (),
    camera: Camera = CAMERA,
    floor: NDArray[np.bool_] | None = None,
) -> Image:
    """Draw a path on a camera frame of any size, as a ribbon of the robot's width.

    `path`: [T, >=2] in metres of the base frame. `others`: paths drawn as thin lines. `floor`: mask [H, W];
    if given, only its pixels are painted.
    """
    scale = image.shape[1] / camera.width
    out = image.copy()
    for other in others:
        left, right, _ = _ribbon(other[:, :2], 0.012, camera, scale)
        for i in range(len(left) - 1, 0, -1):
            _quad(out, (left[i - 1], left[i], right[i], right[i - 1]), OTHER_PAINT)
    out = cv2.addWeighted(out, 0.55, image, 0.45, 0)
    ground = out.copy()
    left, right, share = _ribbon(path[:, :2], 0.6 * ROBOT_RADIUS, camera, scale)
    for i in range(len(left) - 1, 0, -1):
        mix = share[i]
        paint = tuple(int(a * (1 - mix) + b * mix) for a, b in zip(NEAR_PAINT, FAR_PAINT, strict=True))
        _quad(ground, (left[i - 1], left[i], right[i], right[i - 1]), paint)
    out = cv2.addWeighted(ground, 0.62, out, 0.38, 0)
    if len(left) > 1:
        for edge in (left, right):
            points = np.round(edge * 16).astype(np.int32)[None]
            cv2.polylines(out, points, False, (255, 255, 255), 1, cv2.LINE_AA, 4)
    if floor is not None:
        np.copyto(out, image, where=~floor[:, :, None])
    return out


def _ribbon(path: NDArray, half: float, camera: Camera, scale: float) -> tuple[NDArray, NDArray, NDArray]:
    """Compute the left and right edge [K, 2] of a strip along the path, in pixels.

    Also returns the position of each point along the path, from 0 to 1.
    """
    steps = np.hypot(*np.diff(path, axis=0).T)
    path = path[np.concatenate([[True], steps > 1e-4])]
    if len(path) < 2:
        return np.empty((0, 2)), np.empty((0, 2)), np.empty(0)
    along = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    fine = np.linspace(0, along[-1], max(int(along[-1] / 0.03), 2))
    points = np.stack([np.interp(fine, along, path[:, k]) for k in (0, 1)], 1)
    heading = np.arctan2(*np.gradient(points, axis=0).T[::-1])
    normal = np.stack([-np.sin(heading), np.cos(heading)], 1) * half
    left, depth_left = camera.project_floor(points + normal)
    right, depth_right = camera.project_floor(points - normal)
    ahead = (depth_left > 0.15) & (depth_right > 0.15)
    return left[ahead] * scale - 0.5, right[ahead] * scale - 0.5, (fine / max(fine[-1], 1e-6))[ahead]


def _quad(image: Image, corners: Sequence[NDArray], paint: tuple[int, int, int]) -> None:
    cv2.fillConvexPoly(image, np.round(np.stack(corners) * 16).astype(np.int32), paint, cv2.LINE_AA, 4)


def _key_plans(count: int) -> list[int]:
    """Select up to four plans, spread over the episode, with the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(_KEYS, count))})


def _header(canvas: Image, world: World, plans: int) -> None:
    text(canvas, f'"{world.episode.command.text}"', (_MARGIN, 46), 1.05, INK, 2)
    target = world.scene.solids[world.episode.target]
    word, paint = _OUTCOMES[world.outcome]
    distance = target.surface_distance(world.state.x, world.state.y)
    driven = float(np.hypot(*np.diff(world.track[:, :2], axis=0).T).sum())
    facts = (
        f"{plans} plans, {world.time:.1f} s, {driven:.1f} m driven, ends {100 * distance:.0f} cm from the "
    )
    facts += f"{target.name}  (seed {world.episode.seed})"
    text(canvas, facts, (_MARGIN + 2, 78), 0.5, FAINT)
    badge(canvas, word, canvas.shape[1] - _MARGIN, paint)


def _frame(canvas: Image, left: int, top: int, number: int, plan: PlanRecord, world: World) -> None:
    """Draw a key frame with its path, and the answer below."""
    frame = cv2.resize(plan.image, _FRAME, interpolation=cv2.INTER_CUBIC)
    if plan.path is not None:
        ids, _ = identify(world.scene, plan.state)
        floor = cv2.resize((ids < 0).astype(np.uint8) * 255, _FRAME, interpolation=cv2.INTER_LINEAR) > 127
        others = plan.candidates if plan.candidates is not None else ()
        frame = overlay(frame, plan.path, others, floor=floor)
    canvas[top : top + _FRAME[1], left : left + _FRAME[0]] = frame
    rounded(canvas, (left + 10, top + 10), (left + 116, top + 40), 8, INK)
    text(canvas, f"{number}", (left + 20, top + 31), 0.6, (255, 255, 255), 2)
    text(canvas, f"{plan.time:.1f} s", (left + 50, top + 31), 0.55, (235, 235, 235))
    for i, line in enumerate(textwrap.wrap(plan.text, 58)[:4]):
        text(canvas, line, (left, top + _FRAME[1] + 21 + 19 * i), 0.47, INK)
