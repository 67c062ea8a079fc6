# SPDX-License-Identifier: Apache-2.0
"""Reads how GR00T's processors resize and crop the images of cameras.

Sources: NVIDIA Isaac-GR00T, gr00t/model/gr00t_n1d7/image_augmentations.py and that of gr00t_n1d6 (branch
n1.6-release); LeRobot 0.6.1, policies/groot/processor_groot.py.
"""

from __future__ import annotations

import logging

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.groot.version import Version
from edgellm_ros.builder.policies.lerobot import MOST_PIXELS
from edgellm_ros.diffusion.groot_config import CroppedCameraConfig
from edgellm_ros.multimodal.image_crop import AREA, BICUBIC, BILINEAR, ImageCrop, cropped_size
from edgellm_ros.multimodal.patch_processor import smart_resize
from edgellm_ros.multimodal.vision_config import AnySizeTower

logger = logging.getLogger(__name__)

WIDEST = 2  # largest ratio of an image's sides, where the crop keeps it


def read_cameras(
    names: tuple[str, ...], frames: int, crop: ImageCrop, vision: AnySizeTower
) -> CroppedCameraConfig:
    """Make the configuration of cameras, with the most rows of an image.

    frames: images of each camera in the prompt.
    """
    sides = smart_resize(*cropped_size(crop, (crop.short_side or 1, WIDEST * crop.short_side or 1)), vision)
    tokens = (sides[0] // vision.size_factor) * (sides[1] // vision.size_factor)
    return CroppedCameraConfig(names=names, tokens=tokens, crop=crop, frames=frames)


def read_crop(settings: ConfigSection, version: Version) -> ImageCrop:
    """Read the steps of an image as NVIDIA's processor takes them in evaluation."""
    kept = settings.flag("use_albumentations", False)
    letter_box = settings.flag("letter_box_transform", version.boxed_squares and not kept)
    if kept and version.boxed_squares and not settings.has("letter_box_transform"):
        logger.warning(
            "%s has no letter_box_transform: images keep their aspect ratio, as by the code of this version "
            "until February 2026; later code fills them up to squares: add true if it trained the policy",
            settings.where,
        )
    if not kept:
        return _squares(settings, letter_box)
    share, edge = _share(settings), settings.data.get("shortest_image_edge", version.short_side)
    if edge is not None:
        edge = settings.size("shortest_image_edge", version.short_side, MOST_PIXELS)
        return _by_short_side(letter_box, edge, share)
    target = _sides(settings, "image_target_size")
    if version.always_kept:
        return _by_short_side(letter_box, target[0], share)
    return _crop(letter_box, AREA, target, (share, share), target)


def _squares(settings: ConfigSection, letter_box: bool) -> ImageCrop:
    target, kept = _sides(settings, "image_target_size"), _sides(settings, "image_crop_size")
    # The model code rounds the border of a crop, which here is rounded down.
    if any(after > before or (before - after) % 2 for before, after in zip(target, kept, strict=True)):
        raise settings.fail("image_crop_size", f"expected {list(target)} less an even number")
    return _crop(letter_box, BILINEAR, target, (kept[0] / target[0], kept[1] / target[1]), target)


def read_crop_of_lerobot(settings: ConfigSection) -> ImageCrop:
    """Read the steps of an image as LeRobot's processor takes them.

    settings: of its step `groot_n1_7_vlm_encode_v1`.
    """
    letter_box, target = settings.flag("letter_box_transform", False), _sides(settings, "image_target_size")
    edge = settings.size("shortest_image_edge", target[0], MOST_PIXELS)
    share = 1.0
    if settings.has("crop_fraction"):
        share = settings.number("crop_fraction")
    elif settings.has("image_crop_size"):
        share = _sides(settings, "image_crop_size")[0] / target[0]
    share = share if 0 < share < 1 else 1.0  # no crop for others, as in LeRobot
    if settings.flag("use_albumentations", False):
        return _by_short_side(letter_box, edge, share)
    kept = min(1.0, (max(1, round(edge * share)) + 0.5) / edge)  # of which `ImageCrop` drops the half pixel
    return _crop(letter_box, BICUBIC, (edge, edge), (kept, kept), target)


def _by_short_side(letter_box: bool, edge: int, share: float) -> ImageCrop:
    """Make a crop that keeps the aspect ratio."""
    return ImageCrop(
        letter_box=letter_box,
        filter=AREA,
        short_side=edge,
        resized_height=0,
        resized_width=0,
        height=0,
        width=0,
        keep_height=share,
        keep_width=share,
    )


def _crop(
    letter_box: bool,
    kind: str,
    size: tuple[int, int],
    keep: tuple[float, float],
    last: tuple[int, int],
) -> ImageCrop:
    """Make a crop of an image of one size; last: its size after the crop."""
    return ImageCrop(
        letter_box=letter_box,
        filter=kind,
        short_side=0,
        resized_height=size[0],
        resized_width=size[1],
        height=last[0],
        width=last[1],
        keep_height=keep[0],
        keep_width=keep[1],
    )


def _share(settings: ConfigSection) -> float:
    """Read the share of each side that a crop keeps."""
    if settings.data.get("crop_fraction", 0.95) is None:
        target, kept = (_sides(settings, f"image_{name}_size")[0] for name in ("target", "crop"))
        if kept > target:
            raise settings.fail("image_crop_size", f"expected at most image_target_size, {target}")
        return kept / target
    share = settings.number("crop_fraction", 0.95)
    if not 0 < share <= 1:
        raise settings.fail("crop_fraction", "expected above 0 and at most 1")
    return share


def _sides(settings: ConfigSection, key: str) -> tuple[int, int]:
    sides = settings.integers(key)
    if len(sides) != 2 or not all(0 < side <= MOST_PIXELS for side in sides):
        raise settings.fail(key, f"expected height and width in pixels, from 1 to {MOST_PIXELS}")
    return sides[0], sides[1]
