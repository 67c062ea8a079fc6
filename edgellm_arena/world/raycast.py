# SPDX-License-Identifier: Apache-2.0
"""Intersections of camera rays and solids.

Everything is in the base frame. Rays have depth 1, so t is the depth of the hit. Each function takes rays [3,
h, w] and the camera's position (ox, oy, oz) relative to the solid's foot. It returns t [h, w], infinite where
the ray misses, and outward normals [3, h, w], of length 1 where the ray hits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm_arena.world.camera import Camera
from edgellm_arena.world.scene import Solid

Array = NDArray[np.float32]


def window(camera: Camera, solid: Solid, x: float, y: float) -> tuple[int, int, int, int] | None:
    """Find the image region (left, right, top, bottom) that contains a solid.

    The solid is at (x, y) in the base frame. Returns None if it is outside the image.
    """
    r, h = solid.radius * 1.02, solid.height
    if x - r <= camera.x + 0.05:  # beside or behind the camera: in its 90 degrees only if very near
        if x + r <= camera.x + 0.05:
            return None
        if abs(y) - r > x + r - camera.x:
            return None
        return 0, camera.width, 0, camera.height
    corners = np.array([[x + a * r, y + b * r, c * h] for a in (-1, 1) for b in (-1, 1) for c in (0, 1)])
    pixels, depth = camera.project(corners)
    if (depth <= 0.02).any():
        return 0, camera.width, 0, camera.height
    left, top = np.floor(pixels.min(0)).astype(int)
    right, bottom = np.ceil(pixels.max(0)).astype(int)
    left, right = max(left, 0), min(right, camera.width)
    top, bottom = max(top, 0), min(bottom, camera.height)
    return (left, right, top, bottom) if left < right and top < bottom else None


def hit(solid: Solid, yaw: float, rays: Array, ox: float, oy: float, oz: float) -> tuple[Array, Array]:
    """Compute depth and normals of a solid's surface; yaw is in the base frame."""
    if solid.shape == "ball":
        return _ball(rays, ox, oy, oz, solid.radius)
    if solid.shape in ("cylinder", "pillar"):
        return _cylinder(rays, ox, oy, oz, solid.radius, solid.height)
    if solid.shape == "cone":
        return _cone(rays, ox, oy, oz, solid.radius, solid.height)
    return _box(rays, ox, oy, oz, solid.radius / np.sqrt(2.0), solid.height, yaw)


def _nearest_root(a: Array, b: Array, c: float | Array) -> Array:
    """Return the smaller root of a t^2 + 2 b t + c; infinite without a positive root."""
    discriminant = b * b - a * c
    with np.errstate(invalid="ignore", divide="ignore"):
        t = (-b - np.sqrt(discriminant)) / a
    return np.where((discriminant > 0) & (t > 0), t, np.inf).astype(np.float32)


def _ball(d: Array, ox: float, oy: float, oz: float, r: float) -> tuple[Array, Array]:
    oz = oz - r
    a = d[0] * d[0] + d[1] * d[1] + d[2] * d[2]
    t = _nearest_root(a, ox * d[0] + oy * d[1] + oz * d[2], ox * ox + oy * oy + oz * oz - r * r)
    safe = np.where(np.isfinite(t), t, 0)
    return t, np.stack([(ox + safe * d[0]) / r, (oy + safe * d[1]) / r, (oz + safe * d[2]) / r])


def _cap(d: Array, ox: float, oy: float, oz: float, r: float, h: float) -> Array:
    """Compute the depth of the horizontal disc at height h."""
    with np.errstate(invalid="ignore", divide="ignore"):
        t = (h - oz) / d[2]
        px, py = ox + t * d[0], oy + t * d[1]
        return np.where((t > 0) & (px * px + py * py < r * r), t, np.inf).astype(np.float32)


def _cylinder(d: Array, ox: float, oy: float, oz: float, r: float, h: float) -> tuple[Array, Array]:
    a = d[0] * d[0] + d[1] * d[1]
    side = _nearest_root(a, ox * d[0] + oy * d[1], ox * ox + oy * oy - r * r)
    safe = np.where(np.isfinite(side), side, 0)
    z = oz + safe * d[2]
    side[(z < 0) | (z > h)] = np.inf
    top = _cap(d, ox, oy, oz, r, h)
    on_top = top < side
    normals = np.stack([(ox + safe * d[0]) / r, (oy + safe * d[1]) / r, np.zeros_like(side)])
    normals[:, on_top] = np.array([[0], [0], [1]], np.float32)
    return np.minimum(side, top), normals


def _cone(d: Array, ox: float, oy: float, oz: float, r: float, h: float) -> tuple[Array, Array]:
    slope = r / h  # radius per metre below the tip
    below, sink = h - oz, -d[2]
    a = d[0] * d[0] + d[1] * d[1] - slope * slope * sink * sink
    b = ox * d[0] + oy * d[1] - slope * slope * below * sink
    c = ox * ox + oy * oy - slope * slope * below * below
    discriminant = np.maximum(b * b - a * c, 0)
    root = np.sqrt(discriminant)
    best = np.full(a.shape, np.inf, np.float32)
    for sign in (-1.0, 1.0):
        with np.errstate(invalid="ignore", divide="ignore"):
            t = (-b + sign * root) / a
        z = oz + t * d[2]
        good = (b * b - a * c > 0) & (t > 0) & (z >= 0) & (z <= h)
        best = np.where(good & (t < best), t, best)
    best = best.astype(np.float32)
    safe = np.where(np.isfinite(best), best, 0)
    nx, ny = ox + safe * d[0], oy + safe * d[1]
    length = np.sqrt(nx * nx + ny * ny) + 1e-6
    scale = 1 / np.sqrt(1 + slope * slope)
    return best, np.stack([nx / length * scale, ny / length * scale, np.full_like(nx, slope * scale)]).astype(
        np.float32
    )


def _box(d: Array, ox: float, oy: float, oz: float, half: float, h: float, yaw: float) -> tuple[Array, Array]:
    cos, sin = np.cos(yaw), np.sin(yaw)
    local = (cos * d[0] + sin * d[1], -sin * d[0] + cos * d[1], d[2])
    origin = (cos * ox + sin * oy, -sin * ox + cos * oy, oz)
    near = np.full(d.shape[1:], -np.inf, np.float32)
    far = np.full(d.shape[1:], np.inf, np.float32)
    axis = np.zeros(d.shape[1:], np.int8)
    for i, (low, high) in enumerate(((-half, half), (-half, half), (0.0, h))):
        with np.errstate(divide="ignore", invalid="ignore"):
            t0, t1 = (low - origin[i]) / local[i], (high - origin[i]) / local[i]
        enter, leave = np.minimum(t0, t1), np.maximum(t0, t1)
        axis[enter > near] = i
        near, far = np.maximum(near, enter), np.minimum(far, leave)
    t = np.where((near < far) & (near > 0), near, np.inf).astype(np.float32)
    outward = [-np.sign(component) for component in local]
    nx = np.where(axis == 0, outward[0], 0)
    ny = np.where(axis == 1, outward[1], 0)
    return t, np.stack([cos * nx - sin * ny, sin * nx + cos * ny, np.where(axis == 2, outward[2], 0)]).astype(
        np.float32
    )
