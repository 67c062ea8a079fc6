# SPDX-License-Identifier: Apache-2.0
"""Configurations of vision towers with their image processors, one class per kind.

`VisionConfig` is the union of all kinds; in `config.json` the key `kind` chooses one. To add a kind, add a
class here and its image processor in `image_processor.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgellm_ros.multimodal.video_config import VideoConfig, check_bicubic


@dataclass(frozen=True)
class VisionTower:
    """What all have: a transformer over patches, m x m of which become one token.

    Images are resized, rescaled, normalised and cut into patches by the image processor.
    """

    # The chat template writes one placeholder per image. True: the image's rows are put between the tokens
    # vision_start and vision_end; False: the template has written these tokens.
    adds_image_boundaries: ClassVar[bool] = False
    # First dimension of pixel_values: patches, or tiles of patches.
    pixels_dim: ClassVar[str] = "P"

    hidden_size: int
    num_heads: int
    depth: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    spatial_merge_size: int  # m
    resample: int  # PIL's code of the filter: 3, bicubic
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_heads",
            "depth",
            "out_hidden_size",
            "patch_size",
            "spatial_merge_size",
        ):
            check_at_least_1(self, name)
        if self.in_channels != 3:
            raise ValueError(f"in_channels must be 3 (RGB), got {self.in_channels}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} / num_heads {self.num_heads} must be a whole number"
            )
        check_bicubic(self.resample)
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != self.in_channels:
                raise ValueError(f"{name} must have {self.in_channels} values, got {getattr(self, name)}")
        if min(self.image_std) <= 0:
            raise ValueError(f"image_std must be positive, got {self.image_std}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def frames_per_patch(self) -> int:
        """Return the number of frames that pixel_values have of each patch."""
        return 1

    @property
    def patch_dim(self) -> int:
        """Return the number of values of a patch: channels x frames x patch x patch."""
        return self.in_channels * self.frames_per_patch * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2

    @property
    def size_factor(self) -> int:
        """Return the number of pixels of a token's side."""
        return self.patch_size * self.spatial_merge_size

    @property
    def num_deepstack_features(self) -> int:
        """Return the number of inner blocks whose output goes to the language model too."""
        return 0

    @property
    def min_image_tokens(self) -> int:
        """Return the number of tokens of the smallest image."""
        return 1

    def pixels_shape(self, tokens: int) -> tuple[int, ...]:
        """Return pixel_values' shape for the largest image of at most `tokens` tokens."""
        return tokens * self.patches_per_token, self.patch_dim


@dataclass(frozen=True)
class AnySizeTower(VisionTower):
    """What towers for images of any size have.

    An image is resized to multiples of patch size times merge size, within limits of its area.
    """

    min_pixels: int  # smallest area of a resized image; the processor's `shortest_edge`
    max_pixels: int  # largest area of a resized image; the processor's `longest_edge`

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_1(self, "min_pixels")
        if self.max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels {self.max_pixels} is less than min_pixels {self.min_pixels}")


@dataclass(frozen=True)
class QwenVisionTower(AnySizeTower):
    """What the kinds of Qwen have: 2-D rotary positions.

    Weights are for groups of video frames; a still image repeats the frame.
    """

    temporal_patch_size: int
    rope_theta: float
    video: VideoConfig | None = field(default=None, kw_only=True)  # None = the engine takes no videos

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_1(self, "temporal_patch_size")
        if self.head_dim % 4:
            raise ValueError(
                f"hidden_size {self.hidden_size} / num_heads {self.num_heads} must be a multiple of 4"
            )

    @property
    def frames_per_patch(self) -> int:
        return self.temporal_patch_size if self.video is not None else 1


class LearnedGrid:
    """A square grid of learned positions, resampled to the patches of an image."""

    num_position_embeddings: int  # points of the grid, a square number

    def check_grid(self) -> None:
        """Raise ValueError unless the number of points is that of a square."""
        if self.grid_side**2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings must be a square, got {self.num_position_embeddings}")

    @property
    def grid_side(self) -> int:
        """Return the side of the learned position grid."""
        return round(self.num_position_embeddings**0.5)


@dataclass(frozen=True)
class Qwen3VisionConfig(LearnedGrid, QwenVisionTower):
    """Vision tower of Qwen3-VL, Qwen3-Omni and Qwen3.5.

    The tower has a learned position grid and deepstack.
    """

    kind: Literal["qwen3_vl"] = field(default="qwen3_vl", kw_only=True)
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_grid()
        if any(not 0 <= index < self.depth for index in self.deepstack_visual_indexes):
            raise ValueError(
                f"deepstack_visual_indexes {self.deepstack_visual_indexes} outside 0..{self.depth - 1}"
            )

    @property
    def num_deepstack_features(self) -> int:
        return len(self.deepstack_visual_indexes)


@dataclass(frozen=True)
class Siglip2VisionConfig(LearnedGrid, AnySizeTower):
    """Vision tower of Eagle: SigLIP 2, whose learned positions are the only ones."""

    kind: Literal["siglip2"] = field(default="siglip2", kw_only=True)
    num_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_grid()


@dataclass(frozen=True)
class Qwen2_5VisionConfig(QwenVisionTower):
    """Vision tower of Qwen2.5-VL, whose patches attend within windows.

    In some blocks they attend to the whole image.
    """

    kind: Literal["qwen2_5_vl"] = field(default="qwen2_5_vl", kw_only=True)
    window_size: int  # side of a window in pixels
    full_attention_blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_tokens < 1:
            raise ValueError(
                f"window_size must be at least {self.size_factor} pixels, got {self.window_size}"
            )
        if any(not 0 <= index < self.depth for index in self.full_attention_blocks):
            raise ValueError(
                f"full_attention_blocks {self.full_attention_blocks} outside 0..{self.depth - 1}"
            )

    @property
    def window_tokens(self) -> int:
        """Return the number of tokens of a window's side."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def window_patches(self) -> int:
        """Return the number of patches of a whole window."""
        return self.window_tokens**2 * self.patches_per_token

    @property
    def has_windows(self) -> bool:
        return len(set(self.full_attention_blocks)) < self.depth


@dataclass(frozen=True)
class InternVLVisionConfig(VisionTower):
    """Vision tower of InternVL3: an image becomes tiles of one size.

    A tile has tile_size x tile_size pixels. An image is resized to the grid of min_tiles to max_tiles tiles
    whose aspect ratio is nearest; a grid of several tiles is followed by the whole image as one tile.
    """

    adds_image_boundaries: ClassVar[bool] = True
    pixels_dim: ClassVar[str] = "T"

    kind: Literal["internvl"] = field(default="internvl", kw_only=True)
    tile_size: int
    min_tiles: int
    max_tiles: int  # 1 = an image is one tile, whatever min_tiles is

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_1(self, "tile_size")
        check_at_least_1(self, "min_tiles")
        check_at_least_1(self, "max_tiles")
        if self.tile_size % self.size_factor:
            raise ValueError(
                f"tile_size must be a multiple of {self.size_factor} pixels, got {self.tile_size}"
            )

    @property
    def tile_tokens(self) -> int:
        return (self.tile_size // self.size_factor) ** 2

    @property
    def tile_patches(self) -> int:
        return self.tile_tokens * self.patches_per_token

    @property
    def min_image_tokens(self) -> int:
        return self.tile_tokens

    def pixels_shape(self, tokens: int) -> tuple[int, ...]:
        return tokens // self.tile_tokens, self.tile_patches, self.patch_dim


VisionConfig = Qwen3VisionConfig | Qwen2_5VisionConfig | Siglip2VisionConfig | InternVLVisionConfig


def check_at_least_1(config: object, name: str) -> None:
    """Raise ValueError unless the number `name` of a config is at least 1."""
    if getattr(config, name) < 1:
        raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
