# SPDX-License-Identifier: Apache-2.0
"""The arena's coloured solids and grey obstacles, floor, walls and light.

The footprint of a solid, for planning and collisions, is the disc of its radius; a box is inside that disc.
World frame: metres; the robot of an episode starts near the origin and looks along x.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

COLORS = ("red", "green", "blue", "yellow", "purple")
SHAPES = ("box", "ball", "cone", "cylinder")
OBSTACLE_SHAPES = ("pillar", "block")
GREY = "grey"
SPACING = 1.0  # m between the centres of two solids, at least
ROOM_CENTRE = (2.0, 0.0)
FLOORS = ("tiles", "planks", "concrete", "carpet", "checker", "terrazzo", "rubber", "herringbone")
FLOOR_VARIANTS = 4
WALL_VARIANTS = 6

# Centre and half width of the hue in degrees, lowest saturation, lowest value. The colours differ enough for
# people to agree on their names in every light of this arena.
_HUES = {
    "red": (0.0, 7.0, 0.78, 0.62),
    "green": (125.0, 20.0, 0.60, 0.42),
    "blue": (217.0, 12.0, 0.70, 0.55),
    "yellow": (51.0, 5.0, 0.75, 0.80),
    "purple": (281.0, 9.0, 0.50, 0.50),
}


@dataclass(frozen=True)
class Solid:
    """One object on the floor."""

    shape: str
    color: str
    x: float
    y: float
    radius: float  # m
    height: float  # m
    yaw: float  # rad
    rgb: tuple[float, float, float]  # paint, 0..1

    def __post_init__(self) -> None:
        if self.shape not in SHAPES + OBSTACLE_SHAPES:
            raise ValueError(
                f"shape must be one of {', '.join(SHAPES + OBSTACLE_SHAPES)}, got {self.shape!r}"
            )
        if self.color not in (*COLORS, GREY) or (self.color == GREY) != self.is_obstacle:
            expected = GREY if self.is_obstacle else f"one of {', '.join(COLORS)}"
            raise ValueError(f"color of a {self.shape} must be {expected}, got {self.color!r}")

    @property
    def is_obstacle(self) -> bool:
        """Return True for grey solids, which are never named by shape."""
        return self.shape in OBSTACLE_SHAPES

    @property
    def name(self) -> str:
        """Return the robot's name for the solid, without an article."""
        return "grey obstacle" if self.is_obstacle else f"{self.color} {self.shape}"

    def surface_distance(self, x: float, y: float) -> float:
        """Compute the distance in m from a floor point to the footprint; negative inside."""
        return float(np.hypot(self.x - x, self.y - y)) - self.radius


@dataclass(frozen=True)
class Look:
    """Appearance of a picture, without geometry; gains are factors around 1."""

    floor: str
    floor_variant: int
    floor_tint: tuple[float, float, float]
    floor_scale: float
    floor_angle: float  # rad
    floor_offset: tuple[float, float]
    wall_variant: int
    wall_tint: tuple[float, float, float]
    room: tuple[float, float]  # half extent along x and y, m
    light_azimuth: float  # rad
    light_elevation: float  # rad
    ambient: float
    diffuse: float
    specular: float
    shadow: float
    white: tuple[float, float, float]  # colour temperature and exposure
    vignette: float
    blur: float  # sigma in pixels
    noise: float  # sigma in grey levels


@dataclass(frozen=True)
class Scene:
    """Solids and their appearance.

    Coloured solids come before obstacles. No two coloured solids share both colour and shape.
    """

    solids: tuple[Solid, ...]
    look: Look

    def find(self, color: str | None, shape: str) -> int | None:
        """Return the index of the solid with this name.

        Returns None if no solid has the name, or if several match because no colour is given.
        """
        found = [i for i, s in enumerate(self.solids) if s.shape == shape and color in (None, s.color)]
        return found[0] if len(found) == 1 else None

    def clearance(self, x: float, y: float, but: int | None = None) -> float:
        """Compute the distance in m from a floor point to the nearest solid.

        `but`: index of a solid to leave out.
        """
        others = (solid for index, solid in enumerate(self.solids) if index != but)
        return min((solid.surface_distance(x, y) for solid in others), default=np.inf)


def generate_scene(rng: Generator, family: str = "random", alike: float = 0.0) -> Scene:
    """Generate a scene of 2 to 4 coloured solids and 0 to 2 obstacles.

    All solids are in front of the origin. Family "random": solids are anywhere in a fan 0.9 to 4.2 m ahead.
    Family "dead_ahead": solid 0 is 2.2 to 3.5 m straight ahead, the first obstacle is low and in the middle
    of the way to solid 0, and the other solids are aside. `alike`: probability that all coloured solids share
    colour or shape with the first one, so that only colour and shape together identify a solid. ValueError
    for an unknown family.
    """
    if family not in ("random", "dead_ahead"):
        raise ValueError(f"family must be random or dead_ahead, got {family!r}")
    look = random_look(rng)
    names = [(c, s) for c in COLORS for s in SHAPES]
    count = int(rng.integers(2, 5))
    if alike and rng.random() < alike:
        first = names.pop(int(rng.integers(len(names))))
        names = [name for name in names if name[0] == first[0] or name[1] == first[1]]
        named = [first, *(names[i] for i in rng.choice(len(names), count - 1, replace=False))]
    else:
        named = [names[i] for i in rng.choice(len(names), count, replace=False)]
    obstacles = int(rng.choice(3, p=[0.3, 0.4, 0.3]))
    placed: list[tuple[float, float]] = []
    solids: list[Solid] = []
    blocks: list[Solid] = []
    if family == "dead_ahead":
        distance = rng.uniform(2.2, 3.5)
        share = rng.uniform(max(0.42, 1.0 / distance), min(0.56, 1 - SPACING / distance))
        aside = rng.normal(0.0, 0.012)
        placed = [(distance, 0.0), (distance * share, float(np.clip(aside, -0.025, 0.025)))]
        solids.append(make_solid(rng, *named.pop(0)[::-1], *placed[0]))
        blocks.append(make_solid(rng, str(rng.choice(OBSTACLE_SHAPES)), GREY, *placed[1], low=True))
        obstacles = min(max(obstacles - 1, 0), 1)
    keep_off = 1.15 if family == "dead_ahead" else 0.0
    for color, shape in named + [(GREY, str(rng.choice(OBSTACLE_SHAPES))) for _ in range(obstacles)]:
        spot = _free_spot(rng, placed, keep_off)
        if spot is None:
            continue
        placed.append(spot)
        (blocks if color == GREY else solids).append(make_solid(rng, shape, color, *spot))
    return Scene(tuple(solids + blocks), look)


def make_solid(rng: Generator, shape: str, color: str, x: float, y: float, low: bool = False) -> Solid:
    """Make a solid of random size, yaw and paint at (x, y).

    `low`: an obstacle that is low enough for the camera to look over it.
    """
    least, most, heights = {
        "box": (0.17, 0.22, (0.20, 0.36)),
        "ball": (0.14, 0.21, (0.0, 0.0)),
        "cone": (0.15, 0.21, (0.30, 0.50)),
        "cylinder": (0.14, 0.20, (0.24, 0.44)),
        "pillar": (0.14, 0.18, (0.30, 0.55)),
        "block": (0.16, 0.22, (0.20, 0.34)),
    }[shape]
    radius = float(rng.uniform(least, 0.18 if low else most))
    height = 2 * radius if shape == "ball" else float(rng.uniform(*heights))
    if low:
        height = float(rng.uniform(0.15, 0.24))
    return Solid(
        shape, color, float(x), float(y), radius, height, float(rng.uniform(0, 2 * np.pi)), _paint(rng, color)
    )


def random_look(rng: Generator) -> Look:
    """Sample floor, walls, light and camera noise."""
    warmth = rng.uniform(-0.09, 0.09)
    exposure = rng.uniform(0.82, 1.12)
    white = (exposure * (1 + warmth), exposure, exposure * (1 - warmth))
    return Look(
        floor=str(rng.choice(FLOORS)),
        floor_variant=int(rng.integers(FLOOR_VARIANTS)),
        floor_tint=_tint(rng, 0.72, 1.12),
        floor_scale=float(rng.uniform(0.8, 1.3)),
        floor_angle=float(rng.uniform(0, 2 * np.pi)),
        floor_offset=(float(rng.uniform(0, 10)), float(rng.uniform(0, 10))),
        wall_variant=int(rng.integers(WALL_VARIANTS)),
        wall_tint=_tint(rng, 0.75, 1.1),
        room=(float(rng.uniform(4.6, 7.0)), float(rng.uniform(4.6, 7.0))),
        light_azimuth=float(rng.uniform(0, 2 * np.pi)),
        light_elevation=float(rng.uniform(0.65, 1.25)),
        ambient=float(rng.uniform(0.48, 0.66)),
        diffuse=float(rng.uniform(0.38, 0.62)),
        specular=float(rng.uniform(0.05, 0.40)),
        shadow=float(rng.uniform(0.25, 0.55)),
        white=(float(white[0]), float(white[1]), float(white[2])),
        vignette=float(rng.uniform(0.05, 0.32)),
        blur=float(rng.uniform(0.45, 0.8)),
        noise=float(rng.uniform(1.0, 5.0)),
    )


def _free_spot(
    rng: Generator, placed: Sequence[tuple[float, float]], keep_off: float
) -> tuple[float, float] | None:
    for _ in range(60):
        distance, bearing = rng.uniform(0.9, 4.2), rng.uniform(-0.85, 0.85)
        x, y = float(distance * np.cos(bearing)), float(distance * np.sin(bearing))
        if abs(y) >= keep_off and all(np.hypot(x - px, y - py) >= SPACING for px, py in placed):
            return x, y
    return None


def _paint(rng: Generator, color: str) -> tuple[float, float, float]:
    if color == GREY:
        value = rng.uniform(0.30, 0.62)
        return tuple(float(np.clip(value + rng.uniform(-0.012, 0.012), 0, 1)) for _ in range(3))
    hue, spread, saturation, value = _HUES[color]
    turn = ((hue + rng.uniform(-spread, spread)) / 360.0) % 1.0
    return colorsys.hsv_to_rgb(turn, float(rng.uniform(saturation, 0.96)), float(rng.uniform(value, 0.95)))


def _tint(rng: Generator, low: float, high: float) -> tuple[float, float, float]:
    bright = rng.uniform(low, high)
    tint = bright * (1 + rng.uniform(-0.05, 0.05, 3))
    return (float(tint[0]), float(tint[1]), float(tint[2]))
