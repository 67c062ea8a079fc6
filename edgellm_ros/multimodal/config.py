# SPDX-License-Identifier: Apache-2.0
"""Configuration of encoders and their preprocessing, for the runtime."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionConfig:
    """Vision tower of the Qwen3-VL / Qwen3-Omni kind, with its preprocessing."""

    hidden_size: int
    num_heads: int
    depth: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int  # points of the learned position grid, a square number
    deepstack_visual_indexes: tuple[int, ...]
    rope_theta: float
    min_pixels: int  # smallest area of a resized image; the processor's `shortest_edge`
    max_pixels: int  # largest area of a resized image; the processor's `longest_edge`
    resample: int  # PIL's code of the filter; 3 = bicubic
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
            "temporal_patch_size",
            "spatial_merge_size",
            "min_pixels",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.in_channels != 3:
            raise ValueError(f"in_channels must be 3 (RGB), got {self.in_channels}")
        if self.max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels {self.max_pixels} is less than min_pixels {self.min_pixels}")
        if self.grid_side**2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings must be a square, got {self.num_position_embeddings}")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ValueError(
                f"hidden_size {self.hidden_size} / num_heads {self.num_heads} must be a multiple of 4"
            )
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != self.in_channels:
                raise ValueError(f"{name} must have {self.in_channels} values, got {getattr(self, name)}")
        if min(self.image_std) <= 0:
            raise ValueError(f"image_std must be positive, got {self.image_std}")
        if any(not 0 <= index < self.depth for index in self.deepstack_visual_indexes):
            raise ValueError(
                f"deepstack_visual_indexes {self.deepstack_visual_indexes} outside 0..{self.depth - 1}"
            )

    @property
    def grid_side(self) -> int:
        """Return the side of the learned position grid."""
        return round(self.num_position_embeddings**0.5)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Return the number of values of one frame of a patch: channels x patch x patch.

        A still image repeats the frame.
        """
        return self.in_channels * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2

    @property
    def size_factor(self) -> int:
        """Return the number of pixels of which resized heights and widths are multiples."""
        return self.patch_size * self.spatial_merge_size


@dataclass(frozen=True)
class AudioConfig:
    """Audio encoder of Qwen3-Omni, with Whisper's feature extractor."""

    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    output_dim: int
    n_window: int  # half the frames of a chunk; the convolutions process each chunk alone
    n_window_infer: int  # frames whose tokens attend to each other
    num_mel_bins: int  # features per frame
    sampling_rate: int  # Hz
    n_fft: int  # samples that a frame is computed from
    hop_length: int  # samples from one frame to the next

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.d_model % self.encoder_attention_heads or self.d_model % 2 or self.d_model < 4:
            raise ValueError(
                f"d_model {self.d_model} must be even, at least 4, and a multiple of "
                f"encoder_attention_heads {self.encoder_attention_heads}"
            )
        if self.n_window_infer < self.chunk_frames:
            raise ValueError(
                f"n_window_infer {self.n_window_infer} must be at least a chunk of {self.chunk_frames} frames"
            )
        if self.n_fft % 2:
            raise ValueError(f"n_fft must be even, got {self.n_fft}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.encoder_attention_heads

    @property
    def chunk_frames(self) -> int:
        """Return the number of frames of a full chunk."""
        return 2 * self.n_window

    @property
    def chunk_tokens(self) -> int:
        """Return the number of tokens of a full chunk."""
        return halved_three_times(self.chunk_frames)

    def num_tokens(self, frames: int) -> int:
        """Compute the number of tokens of a sound with this number of frames.

        transformers: _get_feat_extract_output_lengths.
        """
        chunks, rest = divmod(frames, self.chunk_frames)
        return chunks * self.chunk_tokens + halved_three_times(rest)

    def max_seconds(self, tokens: int) -> float:
        """Compute the duration below which every sound has at most this number of tokens."""
        chunks, rest = divmod(tokens, self.chunk_tokens)
        frames = chunks * self.chunk_frames + 8 * rest
        return (frames + 1) * self.hop_length / self.sampling_rate


def halved_three_times(size: int) -> int:
    """Compute the size after three convolutions of stride 2, each rounding up."""
    return -(-size // 8)
