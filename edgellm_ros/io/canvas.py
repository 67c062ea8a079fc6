# SPDX-License-Identifier: Apache-2.0
"""Drawing on RGB images [H, W, 3] uint8 with OpenCV, and writing them as PNG."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Paint = tuple[int, int, int]
PAPER, INK, FAINT, WHITE = (250, 248, 244), (38, 42, 50), (120, 124, 132), (255, 255, 255)
GOOD, BAD, DOUBTFUL = (38, 150, 88), (200, 52, 52), (198, 128, 24)  # how an episode ended
FONT = cv2.FONT_HERSHEY_SIMPLEX


def write_png(file: str | Path, image: Image) -> None:
    """Write an image as PNG; OSError if the file cannot be written."""
    done, data = cv2.imencode(".png", image[:, :, ::-1])
    if not done:
        raise OSError(f"cannot encode the picture for {file}")
    Path(file).write_bytes(data.tobytes())


def text(canvas: Image, words: str, at: tuple[int, int], size: float, paint: Paint, weight: int = 1) -> None:
    """Draw text with the left end of its baseline at a pixel."""
    cv2.putText(canvas, words, at, FONT, size, paint, weight, cv2.LINE_AA)


def badge(canvas: Image, word: str, right: int, paint: Paint) -> None:
    """Draw a word on a coloured ground in the header, with its right end at a column."""
    (wide, _), _ = cv2.getTextSize(word, FONT, 0.75, 2)
    rounded(canvas, (right - wide - 40, 22), (right, 66), 12, paint)
    text(canvas, word, (right - wide - 20, 52), 0.75, WHITE, 2)


def rounded(canvas: Image, low: tuple[int, int], high: tuple[int, int], radius: int, paint: Paint) -> None:
    """Draw a filled rectangle with round corners."""
    (x0, y0), (x1, y1) = low, high
    cv2.rectangle(canvas, (x0 + radius, y0), (x1 - radius, y1), paint, -1)
    cv2.rectangle(canvas, (x0, y0 + radius), (x1, y1 - radius), paint, -1)
    for x in (x0 + radius, x1 - radius):
        for y in (y0 + radius, y1 - radius):
            cv2.circle(canvas, (x, y), radius, paint, -1, cv2.LINE_AA)


def line(canvas: Image, points: NDArray, paint: Paint, weight: int, opacity: float = 1.0) -> None:
    """Draw a line through points [N, 2] (x, y) in pixels."""
    layer = canvas.copy() if opacity < 1 else canvas
    cv2.polylines(layer, fixed(points), False, paint, weight, cv2.LINE_AA, 4)
    if opacity < 1:
        cv2.addWeighted(layer, opacity, canvas, 1 - opacity, 0, dst=canvas)


def fixed(points: NDArray) -> list[NDArray[np.int32]]:
    """Convert points [N, 2] to OpenCV's fixed point format with `shift=4`."""
    return [np.round(np.asarray(points) * 16).astype(np.int32)]
