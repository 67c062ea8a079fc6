# SPDX-License-Identifier: Apache-2.0
"""Draws charts: axes, histograms, and shares with their intervals.

Drawn with Pillow, which has a font with real letters; OpenCV, which draws the episodes, has outlines only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from edgellm_ros.echo import escaped
from edgellm_ros.evaluation.shares import Share

Color = tuple[int, int, int]
PAPER, PANEL, GRID = (250, 248, 244), (255, 255, 255), (226, 226, 222)
INK, FAINT = (38, 42, 50), (112, 116, 124)
GREEN, RED, AMBER, BLUE, TEAL = (38, 150, 88), (200, 52, 52), (214, 150, 40), (52, 104, 176), (120, 190, 190)
TITLE, TEXT, SMALL = 30, 24, 21  # sizes of letters in pixels
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # of ticks, times a power of ten


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


class Canvas:
    """A picture that grows from a coloured sheet."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def text(
        self, x: float, y: float, words: str, size: int = TEXT, color: Color = INK, anchor: str = "ls"
    ) -> float:
        """Draw words at their anchor; return their width.

        Anchors are Pillow's: l, m, r and s = baseline, m = middle.
        """
        words = escaped(words)  # the font has no signs for control characters
        self.draw.text((x, y), words, fill=color, font=_font(size), anchor=anchor)
        return float(_font(size).getlength(words))

    def save(self, path: Path) -> None:
        """Write the picture as PNG; OSError if the file cannot be written."""
        self.image.save(path, "PNG")


@dataclass(frozen=True)
class Frame:
    """The rectangle of a panel, in pixels."""

    left: int
    top: int
    width: int
    height: int


class Panel:
    """One chart of a canvas: a title, and an area between two axes."""

    MARGINS = 110, 84, 36, 104  # left, top, right, bottom of the area inside of the frame

    def __init__(self, canvas: Canvas, frame: Frame, title: str, note: str = "") -> None:
        self.canvas, self.frame = canvas, frame
        left, top, right, bottom = self.MARGINS
        self.left, self.right = frame.left + left, frame.left + frame.width - right
        self.top, self.bottom = frame.top + top, frame.top + frame.height - bottom
        box = (frame.left, frame.top, frame.left + frame.width, frame.top + frame.height)
        canvas.draw.rounded_rectangle(box, 14, fill=PANEL)
        wide = canvas.text(frame.left + 28, frame.top + 46, title, TITLE)
        canvas.text(frame.left + 28 + wide + 18, frame.top + 46, note, SMALL, FAINT)

    def y_axis(self, low: float, high: float, step: float, unit: str = "") -> None:
        """Draw horizontal lines with their values."""
        self._low, self._high = low, high
        for index in range(round((high - low) / step) + 1):
            value = low + index * step
            y = self.y(value)
            self.canvas.draw.line((self.left, y, self.right, y), GRID, 2)
            label = f"{value:.{decimals(step)}f}{unit}"
            self.canvas.text(self.left - 14, y, label, SMALL, FAINT, "rm")

    def x_axis(self, low: float, high: float, step: float, label: str) -> None:
        """Draw the values below the area."""
        self._first, self._last = low, high
        for index in range(math.floor((high - low) / step + 1e-9) + 1):
            value = low + index * step
            x = self.x(value)
            self.canvas.draw.line((x, self.bottom, x, self.bottom + 8), FAINT, 2)
            self.canvas.text(x, self.bottom + 36, f"{value:.{decimals(step)}f}", SMALL, FAINT, "ms")
        self.canvas.text((self.left + self.right) / 2, self.bottom + 78, label, SMALL, FAINT, "ms")

    def base(self) -> None:
        """Draw the line at the bottom of the area."""
        self.canvas.draw.line((self.left, self.bottom, self.right, self.bottom), INK, 2)

    def x(self, value: float) -> float:
        """Return the column of a value."""
        return self.left + (self.right - self.left) * (value - self._first) / (self._last - self._first)

    def y(self, value: float) -> float:
        """Return the row of a value."""
        return self.bottom - (self.bottom - self.top) * (value - self._low) / (self._high - self._low)

    def empty(self, words: str) -> None:
        """Say why there is nothing to draw."""
        middle = (self.left + self.right) / 2, (self.top + self.bottom) / 2
        self.canvas.text(*middle, words, TEXT, FAINT, "mm")


def draw_shares(panel: Panel, groups: Sequence[tuple[str, Share]], label: str, divided: int = 0) -> None:
    """Draw shares as dots, with their 95% intervals as lines and the numbers below.

    divided: the number of groups before a line that divides the panel; 0 = no line.
    """
    divided = sum(1 for _, share in groups[:divided] if share.of)
    groups = [group for group in groups if group[1].of]
    if not groups:
        panel.empty("no episodes")
        return
    lowest = min(share.interval[0] for _, share in groups)
    low = 10 * math.floor(lowest * 10)
    panel.y_axis(low, 100, tick_step(100 - low, 6), "%")
    panel.base()
    draw, canvas = panel.canvas.draw, panel.canvas
    column = (panel.right - panel.left) / len(groups)
    if 0 < divided < len(groups):
        middle = panel.left + column * divided
        draw.line((middle, panel.top, middle, panel.bottom + 62), GRID, 2)
    for index, (name, share) in enumerate(groups):
        assert share.value is not None
        x = panel.left + column * (index + 0.5)
        bottom, top = (panel.y(100 * end) for end in share.interval)
        dot = panel.y(100 * share.value)
        draw.line((x, top, x, bottom), GREEN, 5)
        for end in (top, bottom):
            draw.line((x - 17, end, x + 17, end), GREEN, 5)
        draw.ellipse((x - 11, dot - 11, x + 11, dot + 11), fill=GREEN, outline=PANEL, width=2)
        canvas.text(x + 22, dot, f"{100 * share.value:.0f}%", SMALL, INK, "lm")
        canvas.text(x, panel.bottom + 32, name, SMALL, INK, "ms")
        canvas.text(x, panel.bottom + 58, f"{share.count} of {share.of}", SMALL - 3, FAINT, "ms")
    canvas.text((panel.left + panel.right) / 2, panel.bottom + 90, label, SMALL, FAINT, "ms")


def draw_histogram(
    panel: Panel, series: Sequence[tuple[str, Color, Sequence[float]]], label: str, unit: str, bins: int = 40
) -> None:
    """Draw histograms over one axis, each with its median.

    Values beyond the axis are in the last bar.
    """
    series = [each for each in series if each[2]]
    if not series:
        panel.empty("no values")
        return
    values = sorted(value for _, _, each in series for value in each)
    reach = max(_nearly_all(each) for _, _, each in series)
    step = tick_step(reach, 8)
    last = step * math.ceil(reach / step + 1e-9)
    width = last / bins
    counts = []
    for _, _, each in series:
        tally = [0] * bins
        for value in each:
            tally[min(int(value / width), bins - 1)] += 1
        counts.append(tally)
    highest = max(max(tally) for tally in counts)
    up = max(1.0, tick_step(highest, 4))
    panel.y_axis(0, up * math.ceil(highest / up), up)
    beyond = sum(value > last for value in values)
    panel.x_axis(0, last, step, label + (f" ({beyond} beyond {last:g} in the last bar)" if beyond else ""))
    draw, canvas = panel.canvas.draw, panel.canvas
    for (_, color, _), tally in zip(series, counts, strict=True):
        for index, count in enumerate(tally):
            if count:
                left, right = panel.x(index * width) + 1, panel.x((index + 1) * width) - 1
                draw.rectangle((left, panel.y(count), right, panel.bottom), color)
    panel.base()
    x = float(panel.right)
    for name, color, each in reversed(series):
        ordered = sorted(each)
        median = ordered[(len(ordered) - 1) // 2]
        row = panel.x(median)
        for y in range(panel.top, panel.bottom, 12):
            draw.line((row, y, row, y + 6), INK, 2)
        words = f"{name}: median {median:.{0 if median >= 10 else 1}f} {unit}"
        x -= _font(SMALL).getlength(words)
        canvas.text(x, panel.top - 12, words, SMALL, INK)
        draw.rectangle((x - 28, panel.top - 26, x - 12, panel.top - 10), color)
        x -= 52


def tick_step(span: float, most: int) -> float:
    """Return a step of round numbers that divides a span into at most this many parts."""
    least = max(span, 1e-9) / most
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in STEPS if step * power >= least * (1 - 1e-9))


def decimals(step: float) -> int:
    """Return the number of decimals that the multiples of a step need."""
    return next((count for count in range(6) if abs(step * 10**count - round(step * 10**count)) < 1e-6), 6)


def _nearly_all(values: Sequence[float]) -> float:
    """Return the value that 99% do not exceed, with some room."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)] * 1.02
