# SPDX-License-Identifier: Apache-2.0
"""The map of an episode from above: solids, planned paths, and the track.

The heading at the start points up.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from edgellm_arena.episodes.episode import SUCCESS_DISTANCE, Outcome, PlanRecord, World
from edgellm_arena.world import textures
from edgellm_arena.world.camera import CAMERA
from edgellm_arena.world.scene import Look, Solid
from edgellm_arena.world.unicycle import ROBOT_RADIUS, V_MAX, State, to_world
from edgellm_ros.io.canvas import FONT, INK, WHITE, Image, fixed, line

_SLOW, _FAST = (255, 150, 40), (0, 160, 230)
_PLANNED, _CANDIDATE = (0, 190, 172), (70, 120, 120)


class _View:
    """Converts world metres to pixels of a map with x up and y to the left."""

    def __init__(self, points: NDArray, size: tuple[int, int]) -> None:
        low, high = points.min(0) - 0.45, points.max(0) + 0.45
        middle = (low + high) / 2
        self.size = size
        self.scale = float(
            min(size[0] / max(high[1] - low[1], 2.0), (size[1] - 70) / max(high[0] - low[0], 2.0), 230.0)
        )
        self._origin = np.array(
            [size[0] / 2 + middle[1] * self.scale, (size[1] - 70) / 2 + 8 + middle[0] * self.scale]
        )

    def __call__(self, points: NDArray) -> NDArray[np.float64]:
        points = np.asarray(points, np.float64)
        return np.stack([-points[..., 1], -points[..., 0]], -1) * self.scale + self._origin

    def world(self) -> tuple[NDArray, NDArray]:
        """Compute world x and y of every pixel."""
        rows, columns = np.mgrid[0 : self.size[1], 0 : self.size[0]].astype(np.float32)
        return (self._origin[1] - rows) / self.scale, (self._origin[0] - columns) / self.scale


def draw_map(world: World, plans: Sequence[PlanRecord], keys: Sequence[int], size: tuple[int, int]) -> Image:
    """Draw the map [height, width, 3].

    `size`: (width, height) in pixels. `keys`: plans that are marked with a numbered robot.
    """
    solids = world.scene.solids
    target = solids[world.episode.target]
    around = np.array([target.x, target.y]) + (target.radius + 0.1) * np.array(
        [[1, 0], [-1, 0], [0, 1], [0, -1]]
    )
    view = _View(np.concatenate([[[s.x, s.y] for s in solids], around, world.track[:, :2]]), size)
    image = _floor(world.scene.look, view)
    _grid(image, view)
    _view_cone(image, view, world.track[0])
    for solid in solids:
        _shadow(image, view, solid)
    _ring(image, view, target)
    for plan in plans:
        for path in plan.candidates if plan.candidates is not None else ():
            line(image, view(to_world(plan.state, path[:, :2])), _CANDIDATE, 1, 0.5)
        if plan.path is not None:
            line(image, view(to_world(plan.state, plan.path[:, :2])), _PLANNED, 2, 0.6)
    _driven(image, view, world.track)
    for solid in solids:
        _solid(image, view, solid)
    for number, index in enumerate(keys, 1):
        _robot(image, view, plans[index].state, str(number))
    last = plans[keys[-1]].state
    if (
        world.outcome is Outcome.COLLISION
        or np.hypot(world.state.x - last.x, world.state.y - last.y) > ROBOT_RADIUS
    ):
        _robot(image, view, world.state, "x" if world.outcome is Outcome.COLLISION else "")
    for solid in solids:
        _label(image, view, solid)
    _legend(image)
    return image


def _floor(look: Look, view: _View) -> Image:
    """Draw the scene's floor in pale colours, so that drawings on it stand out."""
    x, y = view.world()
    texture = textures.floor_texture(look.floor, look.floor_variant)[1]
    scale = texture.shape[0] / (textures.FLOOR_METRES * look.floor_scale)
    cos, sin = np.cos(look.floor_angle), np.sin(look.floor_angle)
    columns = ((cos * x - sin * y + look.floor_offset[0]) * scale).astype(np.float32)
    rows = ((sin * x + cos * y + look.floor_offset[1]) * scale).astype(np.float32)
    floor = cv2.remap(texture, columns, rows, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP).astype(np.float32)
    floor = floor * np.array(look.floor_tint, np.float32)
    return np.clip(floor * 0.30 + 232 * 0.70, 0, 255).astype(np.uint8)


def _grid(image: Image, view: _View) -> None:
    x, y = view.world()
    for metre in range(int(np.floor(x.min())), int(np.ceil(x.max())) + 1):
        row = int(view([metre, 0.0])[1])
        cv2.line(image, (0, row), (image.shape[1], row), (196, 196, 194), 1)
    for metre in range(int(np.floor(y.min())), int(np.ceil(y.max())) + 1):
        column = int(view([0.0, metre])[0])
        cv2.line(image, (column, 0), (column, image.shape[0]), (196, 196, 194), 1)


def _view_cone(image: Image, view: _View, start: NDArray) -> None:
    """Draw the camera's field of view at the start."""
    edge = np.arctan(CAMERA.width / 2 / CAMERA.focal)
    angles = start[2] + np.linspace(-edge, edge, 32)
    eye = start[:2] + CAMERA.x * np.array([np.cos(start[2]), np.sin(start[2])])
    points = np.concatenate([[eye], eye + 6.0 * np.stack([np.cos(angles), np.sin(angles)], 1)])
    layer = image.copy()
    cv2.fillPoly(layer, fixed(view(points)), WHITE, cv2.LINE_AA, 4)
    cv2.addWeighted(layer, 0.35, image, 0.65, 0, dst=image)


def _driven(image: Image, view: _View, track: NDArray) -> None:
    """Draw the track; colour shows speed."""
    points = view(track[:, :2])
    cv2.polylines(image, fixed(points), False, WHITE, 9, cv2.LINE_AA, 4)
    for a, b, speed in zip(points[:-1], points[1:], track[1:, 3], strict=True):
        mix = speed / V_MAX
        paint = tuple(int(s * (1 - mix) + f * mix) for s, f in zip(_SLOW, _FAST, strict=True))
        cv2.polylines(image, fixed(np.stack([a, b])), False, paint, 5, cv2.LINE_AA, 4)


def _shadow(image: Image, view: _View, solid: Solid) -> None:
    layer = image.copy()
    centre = view([solid.x - 0.04, solid.y - 0.04])
    cv2.circle(layer, *_circle(centre, solid.radius * view.scale * 1.05), (90, 90, 90), -1, cv2.LINE_AA, 4)
    layer = cv2.GaussianBlur(layer, (0, 0), 3)
    cv2.addWeighted(layer, 0.6, image, 0.4, 0, dst=image)


def _ring(image: Image, view: _View, target: Solid) -> None:
    """Draw the ring in which a stop counts as success."""
    centre, radius = view([target.x, target.y]), (target.radius + SUCCESS_DISTANCE) * view.scale
    for start in range(0, 360, 15):
        angles = np.deg2rad(np.linspace(start, start + 8, 5))
        arc = centre + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
        cv2.polylines(image, fixed(arc), False, (38, 150, 88), 2, cv2.LINE_AA, 4)


def _solid(image: Image, view: _View, solid: Solid) -> None:
    paint = tuple(int(235 * c) for c in solid.rgb)
    dark, light = tuple(int(0.6 * p) for p in paint), tuple(int(p + 0.35 * (255 - p)) for p in paint)
    centre, radius = view([solid.x, solid.y]), solid.radius * view.scale
    if solid.shape in ("box", "block"):
        angles = solid.yaw + np.deg2rad([45, 135, 225, 315])
        corners = view(
            np.stack([solid.x + solid.radius * np.cos(angles), solid.y + solid.radius * np.sin(angles)], 1)
        )
        cv2.fillPoly(image, fixed(corners), paint, cv2.LINE_AA, 4)
        cv2.polylines(image, fixed(corners), True, dark, 2, cv2.LINE_AA, 4)
        return
    cv2.circle(image, *_circle(centre, radius), paint, -1, cv2.LINE_AA, 4)
    if solid.shape == "ball":
        cv2.circle(image, *_circle(centre - radius * 0.3, radius * 0.35), light, -1, cv2.LINE_AA, 4)
    elif solid.shape == "cone":
        cv2.circle(image, *_circle(centre, radius * 0.55), light, 1, cv2.LINE_AA, 4)
        cv2.circle(image, *_circle(centre, radius * 0.12), dark, -1, cv2.LINE_AA, 4)
    else:
        cv2.circle(image, *_circle(centre, radius * 0.8), light, 1, cv2.LINE_AA, 4)
    cv2.circle(image, *_circle(centre, radius), dark, 2, cv2.LINE_AA, 4)


def _label(image: Image, view: _View, solid: Solid) -> None:
    words = "obstacle" if solid.is_obstacle else solid.name
    (wide, _), _ = cv2.getTextSize(words, FONT, 0.45, 1)
    x, y = view([solid.x, solid.y])
    at = (int(np.clip(x - wide / 2, 4, image.shape[1] - wide - 4)), int(y - solid.radius * view.scale - 8))
    cv2.putText(image, words, at, FONT, 0.45, (244, 244, 242), 4, cv2.LINE_AA)
    cv2.putText(image, words, at, FONT, 0.45, INK, 1, cv2.LINE_AA)


def _robot(image: Image, view: _View, state: State, mark: str) -> None:
    centre, radius = view([state.x, state.y]), ROBOT_RADIUS * view.scale
    cv2.circle(image, *_circle(centre, radius), WHITE, -1, cv2.LINE_AA, 4)
    cv2.circle(image, *_circle(centre, radius), INK, 2, cv2.LINE_AA, 4)
    nose = view([state.x, state.y] + ROBOT_RADIUS * np.array([np.cos(state.heading), np.sin(state.heading)]))
    cv2.circle(image, *_circle(nose, 0.22 * radius), INK, -1, cv2.LINE_AA, 4)
    if mark:
        (wide, high), _ = cv2.getTextSize(mark, FONT, 0.5, 2)
        at = (int(centre[0] - wide / 2), int(centre[1] + high / 2))
        cv2.putText(image, mark, at, FONT, 0.5, INK, 2, cv2.LINE_AA)


def _legend(image: Image) -> None:
    """Draw the legend below the map."""
    top = image.shape[0] - 44
    image[top:] = 250, 248, 244
    entries = (
        ("driven (slow to fast)", _SLOW, 5),
        ("planned", _PLANNED, 2),
        ("sampled", _CANDIDATE, 1),
        ("goal zone", (38, 150, 88), 2),
    )
    x = 4
    for words, paint, weight in entries:
        cv2.line(image, (x, top + 25), (x + 14, top + 25), paint, weight, cv2.LINE_AA)
        last = _FAST if paint == _SLOW else paint
        cv2.line(image, (x + 14, top + 25), (x + 28, top + 25), last, weight, cv2.LINE_AA)
        cv2.putText(image, words, (x + 36, top + 30), FONT, 0.45, INK, 1, cv2.LINE_AA)
        x += 36 + cv2.getTextSize(words, FONT, 0.45, 1)[0][0] + 22
    cv2.putText(
        image, "grid: 1 m", (image.shape[1] - 84, top + 30), FONT, 0.45, (120, 124, 132), 1, cv2.LINE_AA
    )


def _circle(centre: NDArray, radius: float) -> tuple[tuple[int, int], int]:
    x, y = np.round(np.asarray(centre) * 16).astype(int)
    return (int(x), int(y)), round(radius * 16)
