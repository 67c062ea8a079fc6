# SPDX-License-Identifier: Apache-2.0
"""Sizes of an image that is resized, cropped in its centre, and resized again."""

from __future__ import annotations

from dataclasses import dataclass

AREA, BILINEAR, BICUBIC = "area", "bilinear", "bicubic"
FILTERS = AREA, BILINEAR, BICUBIC

Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class ImageCrop:
    """Sizes in pixels of the steps of a resized and cropped image.

    With a `short_side` the aspect ratio is kept, and the other sizes are 0.
    """

    letter_box: bool  # whether an image is filled up to a square first, with black on both sides
    filter: str  # "area" as of OpenCV, "bilinear" or "bicubic" as of Pillow
    short_side: int  # of the image before and after the crop
    resized_height: int  # before the crop
    resized_width: int
    height: int  # after it
    width: int
    keep_height: float  # share that is kept, in whole pixels
    keep_width: float

    def __post_init__(self) -> None:
        if self.filter not in FILTERS:
            raise ValueError(f"filter must be one of {', '.join(FILTERS)}, got {self.filter!r}")
        sides = self.resized_height, self.resized_width, self.height, self.width
        if self.short_side < 0 or min(sides) < 0 or (self.short_side == 0) != all(sides):
            raise ValueError(f"expected short_side or four sizes, got {self.short_side} and {sides}")
        for name in ("keep_height", "keep_width"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")


def cropped_size(crop: ImageCrop, size: Size) -> Size:
    """Compute the size of an image after all steps."""
    return crop_steps(crop, size)[-1]


def crop_steps(crop: ImageCrop, size: Size) -> tuple[Size, Size, Size, Size]:
    """Compute the sizes after filling up, resizing, cropping and resizing."""
    square = (max(size),) * 2 if crop.letter_box else size
    resized = _by_short_side(crop, square) if crop.short_side else (crop.resized_height, crop.resized_width)
    kept = max(1, int(resized[0] * crop.keep_height)), max(1, int(resized[1] * crop.keep_width))
    return square, resized, kept, _by_short_side(crop, kept) if crop.short_side else (crop.height, crop.width)


def _by_short_side(crop: ImageCrop, size: Size) -> Size:
    if min(size) == crop.short_side:
        return size
    scale = crop.short_side / float(min(size))
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width
