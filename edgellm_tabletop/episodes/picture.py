# SPDX-License-Identifier: Apache-2.0
"""Draws an episode as one picture: key moments, the table, commanded speeds."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from edgellm_ros.io.canvas import (
    BAD,
    DOUBTFUL,
    FAINT,
    FONT,
    GOOD,
    INK,
    PAPER,
    WHITE,
    Image,
    badge,
    fixed,
    line,
    rounded,
    text,
    write_png,
)
from edgellm_tabletop.episodes.drivers import contract
from edgellm_tabletop.episodes.limits import check_limits, shares_of_limits
from edgellm_tabletop.episodes.robot import PERIOD_S, Robot
from edgellm_tabletop.episodes.studio import Studio
from edgellm_tabletop.units import JOINTS
from edgellm_tabletop.world import GOALS, INSTRUCTIONS, MARK_RADIUS, STEP_S

MARGIN, HEADER, FRAME, MAP, CHART = 28, 96, (400, 320), (560, 664), 240
COLUMNS, ROWS = 3, 2  # of key moments
EXECUTED, PLANNED, CARRIED = (255, 150, 40), (0, 214, 196), (150, 70, 160)
OUTCOMES = {"placed": ("placed", GOOD), "timeout": ("timed out", DOUBTFUL), "lost": ("block lost", BAD)}
# The palette of Okabe and Ito, a colour for each joint.
PAINTS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (230, 159, 0))
SCALE, ORIGIN = 1750.0, np.array([0.5 * MAP[0], 70.0])  # of the map: pixels per m, and the arm's base


def save_episode(file: Path, robot: Robot, seed: int, outcome: str) -> None:
    """Write the picture of the robot's last episode as PNG.

    OSError if the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_png(file, draw_episode(robot, seed, outcome))


def draw_episode(robot: Robot, seed: int, outcome: str) -> Image:
    """Draw the robot's last episode [H, W, 3]; ValueError without any step."""
    moments = robot.record.moments
    if not moments:
        raise ValueError("cannot draw an episode without a step: expected at least one, got none")
    width = MAP[0] + COLUMNS * FRAME[0] + (COLUMNS + 2) * MARGIN
    canvas = np.full((HEADER + MAP[1] + MARGIN + CHART, width, 3), PAPER, np.uint8)
    _header(canvas, robot, seed, outcome)
    keys = sorted({round(k) for k in np.linspace(0, len(moments) - 1, COLUMNS * ROWS)})
    canvas[HEADER : HEADER + MAP[1], MARGIN : MARGIN + MAP[0]] = _map(robot, keys)
    studio = Studio(robot.world, FRAME)
    for cell, step in enumerate(keys):
        left = MAP[0] + 2 * MARGIN + (cell % COLUMNS) * (FRAME[0] + MARGIN)
        top = HEADER + (cell // COLUMNS) * (FRAME[1] + 24)
        canvas[top : top + FRAME[1], left : left + FRAME[0]] = _frame(robot, studio, cell + 1, step)
    studio.close()
    canvas[HEADER + MAP[1] + MARGIN :, MARGIN:-MARGIN] = _chart(robot, (width - 2 * MARGIN, CHART))
    return canvas


def _header(canvas: Image, robot: Robot, seed: int, outcome: str) -> None:
    world, record = robot.world, robot.record
    text(canvas, f'"{INSTRUCTIONS[world.goal]}"', (MARGIN, 46), 1.05, INK, 2)
    away = 1e3 * np.hypot(*(world.block[:2] - GOALS[world.goal]))
    refused = sum(bool(plan.refused) for _, plan in record.plans)
    facts = f"{len(record.plans)} chunks, {refused} refused, {world.steps * STEP_S:.1f} s, the block ends "
    facts += f"{away:.0f} mm from the middle of the mark  (seed {seed})"
    text(canvas, facts, (MARGIN + 2, 78), 0.5, FAINT)
    badge(canvas, OUTCOMES[outcome][0], canvas.shape[1] - MARGIN, OUTCOMES[outcome][1])


def _frame(robot: Robot, studio: Studio, number: int, step: int) -> Image:
    """Draw a moment with the gripper's way so far and the planned one."""
    record = robot.record
    frame = studio.picture(record.moments[step].pose).copy()
    before = [(begin, plan) for begin, plan in record.plans if begin <= step]
    if before and step < len(record.moments) - 1:
        begin, plan = before[-1]
        ahead = robot.world.reach(plan.targets[step - begin :])
        if len(ahead) > 1:
            line(frame, studio.project(ahead), PLANNED, 2, 0.8)
    way = np.array([moment.gripper for moment in record.moments[: step + 1]])
    if len(way) > 1:
        line(frame, studio.project(way), EXECUTED, 2, 0.9)
    rounded(frame, (10, 10), (116, 40), 8, INK)
    text(frame, f"{number}", (20, 31), 0.6, WHITE, 2)
    text(frame, f"{step * STEP_S:.1f} s", (50, 31), 0.55, (235, 235, 235))
    return frame


def _on_map(points: NDArray) -> NDArray[np.float64]:
    """Return the pixels (x, y) of points [..., 2 or 3] in m.

    As the policy's camera sees it, the arm is at the top and its left on the right.
    """
    points = np.asarray(points, np.float64)
    return points[..., 1::-1] * SCALE + ORIGIN


def _map(robot: Robot, keys: list[int]) -> Image:
    """Draw the table from above, with the ways of gripper and block."""
    record, world = robot.record, robot.world
    image = np.full((MAP[1], MAP[0], 3), (232, 232, 228), np.uint8)
    for mark in np.arange(-0.2, 0.55, 0.1):  # a line each 10 cm
        column, row = (int(each) for each in _on_map(np.array([mark, mark])))
        cv2.line(image, (column, 0), (column, MAP[1]), (214, 214, 210), 1)
        cv2.line(image, (0, row), (MAP[0], row), (214, 214, 210), 1)
    base = _on_map(np.zeros(2))
    cv2.circle(image, (int(base[0]), int(base[1])), 44, (196, 198, 200), -1, cv2.LINE_AA)
    text(image, "arm", (int(base[0]) - 16, int(base[1]) + 5), 0.5, FAINT)
    goal = _on_map(np.array(GOALS[world.goal])) * 16
    center = int(goal[0]), int(goal[1])
    cv2.circle(image, center, round(MARK_RADIUS * SCALE * 16), (150, 220, 170), -1, cv2.LINE_AA, 4)
    cv2.circle(image, center, round(MARK_RADIUS * SCALE * 16), GOOD, 2, cv2.LINE_AA, 4)
    for _, plan in record.plans:
        line(image, _on_map(world.reach(plan.targets)), PLANNED, 1, 0.7)
    gripper = _on_map(np.array([moment.gripper for moment in record.moments]))
    blocks = np.array([moment.block for moment in record.moments])
    line(image, _on_map(blocks), CARRIED, 5)
    line(image, gripper, WHITE, 5)
    line(image, gripper, EXECUTED, 3)
    for place, paint in ((blocks[0], (196, 170, 200)), (blocks[-1], CARRIED)):
        corners = place[:2] + 0.02 * np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]])
        cv2.fillPoly(image, fixed(_on_map(corners)), paint, cv2.LINE_AA, 4)
        cv2.polylines(image, fixed(_on_map(corners)), True, INK, 1, cv2.LINE_AA, 4)
    for number, step in enumerate(keys, 1):
        x, y = (int(each) for each in gripper[step])
        cv2.circle(image, (x, y), 11, WHITE, -1, cv2.LINE_AA)
        cv2.circle(image, (x, y), 11, INK, 1, cv2.LINE_AA)
        (wide, high), _ = cv2.getTextSize(str(number), FONT, 0.45, 1)
        text(image, str(number), (x - wide // 2, y + high // 2), 0.45, INK)
    _legend(image)
    return image


def _legend(image: Image) -> None:
    top = image.shape[0] - 40
    image[top:] = PAPER
    x = 4
    for words, paint in (
        ("gripper", EXECUTED),
        ("planned", PLANNED),
        ("block", CARRIED),
        ("mark", GOOD),
    ):
        cv2.line(image, (x, top + 24), (x + 26, top + 24), paint, 4, cv2.LINE_AA)
        text(image, words, (x + 34, top + 29), 0.45, INK)
        x += 34 + cv2.getTextSize(words, FONT, 0.45, 1)[0][0] + 24
    text(image, "grid: 10 cm", (image.shape[1] - 94, top + 29), 0.45, FAINT)


def _chart(robot: Robot, size: tuple[int, int]) -> Image:
    """Draw the commanded speed of each joint over time, as a share of its limit."""
    image = np.full((size[1], size[0], 3), PAPER, np.uint8)
    record = robot.record
    largest = check_limits(record, contract())
    words = "commanded speed of each joint, as a share of its limit" + "   " * 3
    shares = (f"{name} {100 * largest[f'largest_{name}']:.0f}%" for name in ("speed", "acceleration", "jerk"))
    words += f"largest {', '.join(shares)} of the contract's; {largest['violations']} beyond"
    text(image, words, (2, 18), 0.5, INK)
    left, right, top, bottom = 52, size[0] - 130, 40, size[1] - 36
    middle, half = (top + bottom) / 2, (bottom - top) / 2
    for share, name in ((1.0, "100%"), (0.0, "0"), (-1.0, "-100%")):
        row = round(middle - share * half)
        cv2.line(image, (left, row), (right, row), BAD if share else (200, 200, 198), 1, cv2.LINE_AA)
        text(image, name, (2, row + 5), 0.42, FAINT)
    shares = shares_of_limits(record, contract())["speed"] * np.sign(np.array(record.speeds))
    seconds = np.arange(1, len(shares) + 1) * PERIOD_S
    wide = (right - left) / max(seconds[-1], 1.0)
    for second in range(int(seconds[-1]) + 1):
        x = round(left + second * wide)
        cv2.line(image, (x, bottom), (x, bottom + 5), FAINT, 1)
        text(image, f"{second} s", (x - 8, bottom + 22), 0.42, FAINT)
    for joint, name in enumerate(JOINTS):
        points = np.stack([left + seconds * wide, middle - half * shares[:, joint]], -1)
        line(image, points, PAINTS[joint], 2)
        row = top + 8 + round(joint * (bottom - top) / len(JOINTS))
        cv2.line(image, (right + 12, row), (right + 30, row), PAINTS[joint], 3, cv2.LINE_AA)
        text(image, name, (right + 36, row + 4), 0.42, INK)
    return image
