# SPDX-License-Identifier: Apache-2.0
"""Renders the robot's camera with a ray caster in NumPy and OpenCV.

Floor and walls are texture lookups. Each solid is traced inside its own image region, and the nearest hit
wins. Light is one lamp at infinity plus ambient light; shadows fall on the floor only. The same scene, pose
and generator state give the same picture, bit for bit, on one machine.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.world import textures
from edgellm_arena.world.camera import CAMERA, rays
from edgellm_arena.world.raycast import hit, window
from edgellm_arena.world.scene import ROOM_CENTRE, Look, Scene, Solid
from edgellm_arena.world.unicycle import State, to_base

_NOISE_POOL = (480, 640)


def render(scene: Scene, pose: State, rng: Generator) -> NDArray[np.uint8]:
    """Render the camera's picture [224, 320, 3] RGB; `rng` makes the sensor noise."""
    image = _floor(scene.look, pose)
    _walls(image, scene.look, pose)
    feet = _feet(scene, pose)
    light = _light(scene.look, pose)
    for solid, (x, y) in zip(scene.solids, feet, strict=True):
        _shade_floor(image, solid, float(x), float(y), scene.look, light)
    depth = np.full((CAMERA.height, CAMERA.width), np.inf, np.float32)
    for solid, (x, y) in zip(scene.solids, feet, strict=True):
        _draw(image, depth, solid, float(x), float(y), solid.yaw - pose.heading, scene.look, light)
    return _sensor(image, scene.look, rng)


def identify(scene: Scene, pose: State, scale: int = 1) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Find the solid that each pixel shows, [224/scale, 320/scale]: its index, or -1.

    Also returns how many pixels each solid would cover without occlusion, [M].
    """
    camera = CAMERA if scale == 1 else CAMERA.scaled(scale)
    depth = np.full((camera.height, camera.width), np.inf, np.float32)
    ids = np.full((camera.height, camera.width), -1, np.int8)
    alone = np.zeros(len(scene.solids), np.int64)
    for index, (solid, (x, y)) in enumerate(zip(scene.solids, _feet(scene, pose), strict=True)):
        box = window(camera, solid, float(x), float(y))
        if box is None:
            continue
        left, right, top, bottom = box
        t, _ = hit(
            solid,
            solid.yaw - pose.heading,
            rays(camera)[:, top:bottom, left:right],
            camera.x - x,
            -y,
            camera.z,
        )
        alone[index] = np.isfinite(t).sum()
        near = depth[top:bottom, left:right]
        won = t < near
        near[won] = t[won]
        ids[top:bottom, left:right][won] = index
    return ids, alone


def _feet(scene: Scene, pose: State) -> NDArray[np.float64]:
    return to_base(pose, np.array([[s.x, s.y] for s in scene.solids]).reshape(-1, 2))


def _light(look: Look, pose: State) -> NDArray[np.float32]:
    """Compute the direction to the lamp in the base frame [3]."""
    azimuth = look.light_azimuth - pose.heading
    flat = np.cos(look.light_elevation)
    return np.array(
        [flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(look.light_elevation)], np.float32
    )


@lru_cache(maxsize=1)
def _floor_points() -> tuple[int, NDArray[np.float32], NDArray[np.float32], tuple[tuple[int, int, int], ...]]:
    """Compute the floor points of all pixels below the horizon.

    Returns the first row below the horizon, floor points [2, rows, W] of the base frame, their depths [rows,
    W], and mip bands. A band (level, first row, last row + 1) shares one mip level, which follows from the
    size of a pixel's footprint.
    """
    first = int(np.ceil(CAMERA.horizon)) + 2
    down = rays(CAMERA)[:, first:]
    t = CAMERA.z / -down[2]
    points = np.stack([CAMERA.x + t * down[0], t * down[1]]).astype(np.float32)
    middle = np.hypot(points[0, :, CAMERA.width // 2] - CAMERA.x, CAMERA.z)
    across = middle / CAMERA.focal
    along = across * middle / CAMERA.z
    texel = textures.FLOOR_METRES / textures.FLOOR_SIZE
    levels = np.clip(np.round(np.log2(np.sqrt(across * along) / texel)), 0, textures.FLOOR_LEVELS - 1).astype(
        int
    )
    edges = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
    bands = tuple((int(levels[a]), a, b) for a, b in pairwise(edges))
    return first, points, np.ascontiguousarray(t), bands


def _floor(look: Look, pose: State) -> NDArray[np.uint8]:
    """Draw a picture [224, 320, 3] with the floor below the horizon and black above."""
    first, points, _, bands = _floor_points()
    image = np.zeros((CAMERA.height, CAMERA.width, 3), np.uint8)
    levels = textures.floor_texture(look.floor, look.floor_variant)
    turn = pose.heading + look.floor_angle
    cos, sin = np.cos(look.floor_angle), np.sin(look.floor_angle)
    metres = textures.FLOOR_METRES * look.floor_scale
    x0 = (cos * pose.x - sin * pose.y + look.floor_offset[0]) % metres
    y0 = (sin * pose.x + cos * pose.y + look.floor_offset[1]) % metres
    cos, sin = np.cos(turn), np.sin(turn)
    for level, top, bottom in bands:
        texture = levels[level]
        scale = texture.shape[0] / metres
        px, py = points[0, top:bottom], points[1, top:bottom]
        columns = px * np.float32(cos * scale) - py * np.float32(sin * scale) + np.float32(x0 * scale)
        rows = px * np.float32(sin * scale) + py * np.float32(cos * scale) + np.float32(y0 * scale)
        image[first + top : first + bottom] = cv2.remap(
            texture, columns, rows, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP
        )
    below = image[first:]
    cv2.multiply(below, (*look.floor_tint, 1.0), dst=below)
    return image


def _walls(image: NDArray[np.uint8], look: Look, pose: State) -> None:
    """Draw the room's walls over the floor behind them."""
    gap_x = look.room[0] - abs(pose.x - ROOM_CENTRE[0])
    gap_y = look.room[1] - abs(pose.y - ROOM_CENTRE[1])
    nearest = max(min(gap_x, gap_y), 0.3)
    foot = CAMERA.height / 2 + CAMERA.focal * np.tan(np.arctan2(CAMERA.z, nearest - 0.15) - CAMERA.pitch)
    # At the picture's sides a wall's foot is lower.
    bottom = int(np.clip(np.ceil(foot) + 12, 60, CAMERA.height))
    cos, sin = np.float32(np.cos(pose.heading)), np.float32(np.sin(pose.heading))
    forward, left, up = rays(CAMERA)[:, :bottom]
    wx, wy = cos * forward - sin * left, sin * forward + cos * left
    ox, oy = pose.x + CAMERA.x * cos - ROOM_CENTRE[0], pose.y + CAMERA.x * sin - ROOM_CENTRE[1]
    wx = np.where(np.abs(wx) < 1e-6, np.float32(1e-6), wx)
    wy = np.where(np.abs(wy) < 1e-6, np.float32(1e-6), wy)
    tx = (np.copysign(np.float32(look.room[0]), wx) - np.float32(ox)) / wx
    ty = (np.copysign(np.float32(look.room[1]), wy) - np.float32(oy)) / wy
    facing_x = tx < ty
    t = np.where(facing_x, tx, ty)
    height = CAMERA.z + t * up
    along = np.where(facing_x, oy + t * wy, ox + t * wx + np.float32(3.1))
    texture = textures.wall_texture(look.wall_variant)
    per_metre = np.float32(texture.shape[0] / textures.WALL_METRES[0])
    rows = np.minimum(texture.shape[0] - 1 - height * per_metre, np.float32(texture.shape[0] - 1))
    columns = (along + np.float32(20.0)) * per_metre
    painted = cv2.remap(
        texture,
        columns.astype(np.float32),
        rows.astype(np.float32),
        cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_WRAP,
    )
    cv2.multiply(painted, (*look.wall_tint, 1.0), dst=painted)
    shade = 0.86 + 0.14 * abs(np.cos(look.light_azimuth))
    turned = cv2.multiply(painted, (shade, shade, shade, 1.0))
    np.copyto(image[:bottom], painted, where=((height >= 0) & facing_x)[:, :, None])
    np.copyto(image[:bottom], turned, where=((height >= 0) & ~facing_x)[:, :, None])


def _shade_floor(
    image: NDArray[np.uint8], solid: Solid, x: float, y: float, look: Look, light: NDArray[np.float32]
) -> None:
    """Darken the floor below the solid (contact) and in its shadow (cast)."""
    first, points, _, _ = _floor_points()
    reach = solid.height * 0.85 / float(np.tan(look.light_elevation))
    away = -light[:2] / max(float(np.hypot(light[0], light[1])), 1e-6)
    end = np.array([x, y]) + away * reach
    pad = solid.radius * 1.7
    low, high = np.minimum(end, [x, y]) - pad, np.maximum(end, [x, y]) + pad
    low[0] = max(low[0], CAMERA.x + 0.25)  # closer floor points are below the picture
    if high[0] <= low[0]:
        return
    corners = np.array([[low[0], low[1]], [low[0], high[1]], [high[0], low[1]], [high[0], high[1]]])
    pixels, _ = CAMERA.project_floor(corners)
    left, top = np.floor(pixels.min(0)).astype(int)
    right, bottom = np.ceil(pixels.max(0)).astype(int)
    left, right = max(left, 0), min(right, CAMERA.width)
    top, bottom = max(top, first), min(bottom, CAMERA.height)
    if left >= right or top >= bottom:
        return
    px = points[0, top - first : bottom - first, left:right] - np.float32(x)
    py = points[1, top - first : bottom - first, left:right] - np.float32(y)
    r = np.float32(solid.radius)
    contact = np.clip(1.55 - np.sqrt(px * px + py * py) / r, 0, 0.6) * np.float32(0.75)
    along = np.clip((px * away[0] + py * away[1]) / max(reach, 1e-3), 0, 1)
    dx, dy = px - along * np.float32(away[0] * reach), py - along * np.float32(away[1] * reach)
    thin = 0.85 * (1 - 0.75 * along) if solid.shape == "cone" else 0.85
    edge = 0.18 + 0.35 * along
    cast = np.clip((thin - np.sqrt(dx * dx + dy * dy) / r) / edge + 0.5, 0, 1)
    cast = cast * cast * (3 - 2 * cast) * (1 - 0.35 * along) * np.float32(look.shadow)
    gain = (1 - cast) * (1 - contact)
    floor = image[top:bottom, left:right]
    floor[:] = floor * gain[:, :, None]


def _draw(
    image: NDArray[np.uint8],
    depth: NDArray[np.float32],
    solid: Solid,
    x: float,
    y: float,
    yaw: float,
    look: Look,
    light: NDArray[np.float32],
) -> None:
    """Draw the solid where it is the nearest surface so far."""
    box = window(CAMERA, solid, x, y)
    if box is None:
        return
    left, right, top, bottom = box
    d = rays(CAMERA)[:, top:bottom, left:right]
    t, n = hit(solid, yaw, d, CAMERA.x - x, -y, CAMERA.z)
    won = t < depth[top:bottom, left:right]
    if not won.any():
        return
    t, d, n = t[won], d[:, won], n[:, won]
    depth[top:bottom, left:right][won] = t
    lambert = np.maximum(light @ n, 0)
    view = -d / np.sqrt((d * d).sum(0))
    half = view + light[:, None]
    half /= np.sqrt((half * half).sum(0))
    shine = np.maximum((half * n).sum(0), 0) ** 24 * np.float32(look.specular)
    z = CAMERA.z + t * d[2]
    grounded = 0.72 + 0.28 * np.clip(z / np.float32(0.14), 0, 1)  # less light near the floor
    sky = 0.88 + 0.12 * n[2]
    lit = (look.ambient * sky + look.diffuse * lambert) * grounded
    if solid.shape in ("box", "block"):
        lit = lit * (0.93 + 0.07 * np.abs(n[0]))
    paint = np.array(solid.rgb, np.float32) * 255
    colour = lit[:, None] * paint + (shine * 235)[:, None]
    image[top:bottom, left:right][won] = np.clip(colour, 0, 255)


@lru_cache(maxsize=1)
def _lens() -> NDArray[np.float32]:
    """Compute the squared distance from the picture's centre [224, 320].

    The distance is 1 in the corners.
    """
    u = (np.arange(CAMERA.width) + 0.5) / CAMERA.width * 2 - 1
    v = (np.arange(CAMERA.height) + 0.5) / CAMERA.height * 2 - 1
    return ((u[None, :] ** 2 + v[:, None] ** 2) / 2).astype(np.float32)


@lru_cache(maxsize=1)
def _noise_pool() -> NDArray[np.float32]:
    """Make white noise of unit variance, correlated between the three channels.

    Pictures use random windows of it.
    """
    rng = np.random.default_rng(0x5E4503)
    grey = rng.standard_normal((*_NOISE_POOL, 1)).astype(np.float32)
    return (0.8 * grey + 0.6 * rng.standard_normal((*_NOISE_POOL, 3))).astype(np.float32)


def _sensor(image: NDArray[np.uint8], look: Look, rng: Generator) -> NDArray[np.uint8]:
    """Apply lens blur, vignetting, exposure and noise."""
    soft = cv2.GaussianBlur(image, (3, 3), look.blur)
    gain = cv2.merge([(1 - look.vignette * _lens()) * np.float32(w) for w in look.white])
    out = cv2.multiply(soft, gain, dtype=cv2.CV_32F)
    row = int(rng.integers(_NOISE_POOL[0] - CAMERA.height + 1))
    column = int(rng.integers(_NOISE_POOL[1] - CAMERA.width + 1))
    noise = _noise_pool()[row : row + CAMERA.height, column : column + CAMERA.width]
    cv2.scaleAdd(noise, look.noise * float(rng.choice((-1.0, 1.0))), out, dst=out)
    return cv2.convertScaleAbs(cv2.max(out, 0.0))
