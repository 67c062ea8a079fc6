# SPDX-License-Identifier: Apache-2.0
"""Seamless floor and wall textures, made from noise and simple drawing.

Each texture is made once per process and stored with smaller, blurred copies (mip levels), which keep the far
floor from flickering.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

FLOOR_SIZE = 512  # px on each side
FLOOR_METRES = 2.0  # period of the texture
FLOOR_LEVELS = 6
WALL_SIZE = (192, 512)  # rows, columns
WALL_METRES = (3.0, 8.0)

_BASES = {  # plausible colours of each kind, RGB 0..255
    "tiles": ((196, 192, 184), (150, 158, 164), (206, 190, 166), (112, 120, 126)),
    "planks": ((168, 122, 82), (138, 98, 66), (192, 158, 116), (116, 88, 70)),
    "concrete": ((150, 150, 146), (122, 124, 128), (174, 170, 160), (98, 98, 98)),
    "carpet": ((104, 112, 128), (134, 118, 106), (88, 100, 96), (146, 142, 136)),
    "checker": ((190, 188, 182), (170, 160, 148), (150, 156, 160), (204, 198, 186)),
    "terrazzo": ((198, 194, 188), (166, 164, 162), (184, 178, 164), (136, 138, 142)),
    "rubber": ((70, 72, 76), (92, 92, 90), (58, 64, 72), (110, 104, 100)),
    "herringbone": ((176, 134, 92), (150, 116, 84), (196, 170, 134), (124, 100, 82)),
}
_WALLS = (
    (206, 202, 194),
    (178, 188, 196),
    (214, 200, 176),
    (160, 164, 160),
    (190, 178, 172),
    (226, 224, 220),
)


@lru_cache(maxsize=64)
def floor_texture(kind: str, variant: int) -> tuple[NDArray[np.uint8], ...]:
    """Return the mip levels of a floor, finest first: RGB [S, S, 3], S = 512, 256, ..."""
    rng = np.random.default_rng([zlib.crc32(kind.encode()), variant])
    base = np.array(_BASES[kind][variant], np.float32)
    texture = _FLOORS[kind](rng, base)
    levels = [np.clip(texture, 0, 255).astype(np.uint8)]
    for _ in range(FLOOR_LEVELS - 1):
        levels.append(cv2.resize(levels[-1], None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA))
    for level in levels:
        level.setflags(write=False)
    return tuple(levels)


@lru_cache(maxsize=16)
def wall_texture(variant: int) -> NDArray[np.uint8]:
    """Return a wall, RGB [192, 512, 3]; the last row is at the floor."""
    rng = np.random.default_rng([0x57A11, variant])
    rows, columns = WALL_SIZE
    wall = np.ones((rows, columns, 3), np.float32) * np.array(_WALLS[variant], np.float32)
    wall *= np.linspace(1.05, 0.90, rows, dtype=np.float32)[:, None, None]
    wall += 3.0 * _noise(rng, columns, 16)[:rows, :, None]
    if variant % 3 == 0:  # panels
        for column in range(0, columns, 64):
            wall[:, column : column + 2] *= 0.88
    elif variant % 3 == 1:  # a darker lower half with a rail
        wall[rows - 64 :] *= np.array([0.78, 0.82, 0.86], np.float32)
        wall[rows - 66 : rows - 63] *= 0.8
    else:  # wide soft stripes
        wall *= (1 + 0.05 * np.sign(np.sin(np.arange(columns) * 2 * np.pi / 64)))[None, :, None].astype(
            np.float32
        )
    for _ in range(int(rng.integers(1, 4))):  # doors and posters, in muted paints
        left, wide = int(rng.integers(0, columns - 60)), int(rng.integers(24, 56))
        top, bottom = (rows - 130, rows) if rng.random() < 0.5 else (rows - 140, rows - 70)
        paint = rng.uniform(70, 190) + rng.uniform(-14, 14, 3)
        wall[top:bottom, left : left + wide] = paint
        wall[top : top + 2, left : left + wide] *= 0.7
        wall[top:bottom, left : left + 2] *= 0.8
    wall[rows - 7 :] = float(rng.uniform(60, 220))  # skirting board
    wall[rows - 8] *= 0.75
    result = np.clip(cv2.GaussianBlur(wall, (3, 3), 0), 0, 255).astype(np.uint8)
    result.setflags(write=False)
    return result


def _noise(rng: Generator, size: int, cell: int) -> NDArray[np.float32]:
    """Make seamless smooth noise [size, size] of about unit variance.

    Spots of the noise are `cell` pixels wide.
    """
    coarse = rng.standard_normal((size // cell, size // cell)).astype(np.float32)
    coarse = np.pad(coarse, 2, mode="wrap")
    fine = cv2.resize(coarse, None, fx=cell, fy=cell, interpolation=cv2.INTER_CUBIC)
    return fine[2 * cell : 2 * cell + size, 2 * cell : 2 * cell + size] * 1.2


def _clouds(rng: Generator, size: int = FLOOR_SIZE) -> NDArray[np.float32]:
    return (
        sum(_noise(rng, size, cell) * weight for cell, weight in ((128, 0.5), (32, 0.35), (8, 0.25))) / 0.66
    )


def _grain(rng: Generator, sigma: float) -> NDArray[np.float32]:
    return sigma * rng.standard_normal((FLOOR_SIZE, FLOOR_SIZE, 1)).astype(np.float32)


def _tiles(rng: Generator, base: NDArray) -> NDArray[np.float32]:
    tile = int(rng.choice([64, 128]))
    count = FLOOR_SIZE // tile
    shade = 1 + 0.045 * rng.standard_normal((count, count)).astype(np.float32)
    out = base * np.kron(shade, np.ones((tile, tile), np.float32))[:, :, None]
    out = out + 5 * _clouds(rng)[:, :, None] + _grain(rng, 2.5)
    grout = np.zeros(FLOOR_SIZE, bool)
    for line in range(0, FLOOR_SIZE, tile):
        grout[line : line + 4] = True
    out[grout[:, None] | grout[None, :]] = base * float(rng.uniform(0.55, 0.8))
    return out


def _boards(rng: Generator, base: NDArray, wide: int, long: int) -> NDArray[np.float32]:
    out = np.empty((FLOOR_SIZE, FLOOR_SIZE, 3), np.float32)
    streaks = cv2.resize(rng.standard_normal((FLOOR_SIZE, 16)).astype(np.float32), (FLOOR_SIZE, FLOOR_SIZE))
    for i, row in enumerate(range(0, FLOOR_SIZE, wide)):
        start = int(rng.integers(0, long)) if i % 2 else int(rng.integers(0, long)) // 2
        line = np.empty((wide, FLOOR_SIZE, 3), np.float32)
        for column in range(0, FLOOR_SIZE, long):
            line[:, column : column + long] = base * (1 + 0.10 * rng.standard_normal())
            line[:, column : column + 2] *= 0.55
        line[:2] *= 0.6
        out[row : row + wide] = np.roll(line, start, 1)
    return out + 7 * streaks[:, :, None] + _grain(rng, 3)


def _planks(rng: Generator, base: NDArray) -> NDArray[np.float32]:
    return _boards(rng, base, 32, 256)


def _herringbone(rng: Generator, base: NDArray) -> NDArray[np.float32]:
    block, out = 64, np.empty((FLOOR_SIZE, FLOOR_SIZE, 3), np.float32)
    for i in range(FLOOR_SIZE // block):
        for j in range(FLOOR_SIZE // block):
            patch = np.empty((block, block, 3), np.float32)
            for k in range(0, block, 16):
                patch[k : k + 16] = base * (1 + 0.09 * rng.standard_normal())
                patch[k] *= 0.6
            out[i * block : (i + 1) * block, j * block : (j + 1) * block] = (
                patch if (i + j) % 2 else patch.transpose(1, 0, 2)
            )
    return out + 4 * _clouds(rng)[:, :, None] + _grain(rng, 3)


def _concrete(rng: Generator, base: NDArray) -> NDArray[np.float32]:
    out = base + 9 * _clouds(rng)[:, :, None] + _grain(rng, 4)
    if rng.random() < 0.6:
        out[:3] *= 0.75
        out[:, :3] *= 0.75
    return out


def _carpet(rng: Generator, base: NDArray) -> NDArray[np.float32]:
    return base + 5 * _clouds(rng)[:, :, None] + 10 * _noise(rng, FLOOR_SIZE, 4)[:, :, None] + _grain(rng, 9)


def _checker(rng: Generator, base: NDArray) -> NDArray[np.float32]:
    tile = int(rng.choice([64, 128]))
    index = np.arange(FLOOR_SIZE) // tile
    dark = ((index[:, None] + index[None, :]) % 2).astype(np.float32)[:, :, None]
    return base * (1 - float(rng.uniform(0.25, 0.6)) * dark) + 4 * _clouds(rng)[:, :, None] + _grain(rng, 2.5)


def _terrazzo(rng: Generator, base: NDArray) -> NDArray[np.float32]:
    out = (base + _grain(rng, 2)).astype(np.float32)
    for _ in range(900):
        centre = (int(rng.integers(0, FLOOR_SIZE)), int(rng.integers(0, FLOOR_SIZE)))
        paint = np.clip(base * rng.uniform(0.55, 1.2) + rng.uniform(-12, 12, 3), 0, 255)
        size = (int(rng.integers(2, 7)), int(rng.integers(2, 5)))
        cv2.ellipse(out, centre, size, float(rng.uniform(0, 180)), 0, 360, tuple(float(p) for p in paint), -1)
    return out


def _rubber(rng: Generator, base: NDArray) -> NDArray[np.float32]:
    out = base + 3 * _clouds(rng)[:, :, None] + _grain(rng, 3)
    out = np.ascontiguousarray(out, np.float32)
    for row in range(16, FLOOR_SIZE, 32):
        for column in range(16, FLOOR_SIZE, 32):
            cv2.circle(out, (column, row), 8, tuple(float(b) * 1.22 for b in base), -1, cv2.LINE_AA)
    return out


_FLOORS = {
    "tiles": _tiles,
    "planks": _planks,
    "concrete": _concrete,
    "carpet": _carpet,
    "checker": _checker,
    "terrazzo": _terrazzo,
    "rubber": _rubber,
    "herringbone": _herringbone,
}
