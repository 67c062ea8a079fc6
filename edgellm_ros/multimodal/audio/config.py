# SPDX-License-Identifier: Apache-2.0
"""Configurations of audio encoders and feature extractors, one class per kind.

`AudioConfig` is the union of all kinds; in `config.json` the key `kind` chooses one. All have Whisper's
feature extractor, and cut a sound into chunks that the convolutions process alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass(frozen=True)
class AudioEncoder(ABC):
    """What all have: convolutions over chunks of log-mel frames, then a transformer."""

    # What the last frames see after the end of a sound: zeros, and a frame that has begun counts (True), or
    # the sound's own end mirrored, and only whole frames count (False).
    ends_in_silence: ClassVar[bool] = False

    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    output_dim: int
    n_window: int  # half the frames of a chunk
    num_mel_bins: int  # features per frame
    sampling_rate: int  # Hz
    n_fft: int  # samples that a frame is computed from
    hop_length: int  # samples from one frame to the next

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("min_samples", "whole_chunks") else 1
            if not isinstance(value, str) and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.d_model % self.encoder_attention_heads or self.d_model % 2 or self.d_model < 4:
            raise ValueError(
                f"d_model {self.d_model} must be even, at least 4, and a multiple of "
                f"encoder_attention_heads {self.encoder_attention_heads}"
            )
        if self.n_fft % 2:
            raise ValueError(f"n_fft must be even, got {self.n_fft}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.encoder_attention_heads

    @property
    def chunk_frames(self) -> int:
        return 2 * self.n_window

    @property
    def chunk_tokens(self) -> int:
        return self.num_tokens(self.chunk_frames)

    @property
    def shortest(self) -> int:
        """Return the smallest number of samples of a sound, which the first frame needs."""
        return self.n_fft // 2 + 1

    def num_frames(self, samples: int) -> int:
        """Compute the number of frames of a sound with this number of samples."""
        return -(-samples // self.hop_length) if self.ends_in_silence else samples // self.hop_length

    @abstractmethod
    def num_tokens(self, frames: int) -> int:
        """Compute the number of tokens of a sound with this number of frames."""

    @abstractmethod
    def max_frames(self, tokens: int) -> int:
        """Compute the largest number of frames that become at most this number of tokens."""

    def max_seconds(self, tokens: int) -> float:
        """Compute the duration below which every sound has at most this number of tokens."""
        frames = self.max_frames(tokens) + (0 if self.ends_in_silence else 1)
        return frames * self.hop_length / self.sampling_rate


@dataclass(frozen=True)
class Qwen3AudioConfig(AudioEncoder):
    """Audio encoder of Qwen3-Omni and Qwen3-ASR.

    Three 2-D convolutions, then attention within windows of several chunks.
    """

    kind: Literal["qwen3_omni"] = field(default="qwen3_omni", kw_only=True)
    n_window_infer: int  # frames whose tokens attend to each other
    # A shorter sound is extended with silence, which counts as sound; 0 = not extended.
    min_samples: int = field(default=0, kw_only=True)
    # Pad a single chunk to its full length too, before the convolutions.
    whole_chunks: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_window_infer < self.chunk_frames:
            raise ValueError(
                f"n_window_infer {self.n_window_infer} must be at least a chunk of {self.chunk_frames} frames"
            )

    def num_tokens(self, frames: int) -> int:
        """As transformers' _get_feat_extract_output_lengths of Qwen3-Omni."""
        chunks, rest = divmod(frames, self.chunk_frames)
        return chunks * halved_three_times(self.chunk_frames) + halved_three_times(rest)

    def max_frames(self, tokens: int) -> int:
        chunks, rest = divmod(tokens, self.chunk_tokens)
        return chunks * self.chunk_frames + 8 * rest


@dataclass(frozen=True)
class Qwen2_5AudioConfig(AudioEncoder):
    """Audio encoder of Qwen2.5-Omni.

    Two 1-D convolutions, then attention within chunks. Two rows of a sound become one token.
    """

    ends_in_silence: ClassVar[bool] = True
    whole_chunks: ClassVar[bool] = True  # the frames of padding are masked, so any number gives the same
    min_samples: ClassVar[int] = 0

    kind: Literal["qwen2_5_omni"] = field(default="qwen2_5_omni", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_window % 2:
            raise ValueError(f"n_window must be even, so that chunks have whole tokens, got {self.n_window}")

    @property
    def shortest(self) -> int:
        """Return the smallest number of samples of a sound: two rows make a token."""
        return 2 * self.hop_length + 1

    def num_tokens(self, frames: int) -> int:
        """As transformers' _get_feat_extract_output_lengths of Qwen2.5-Omni.

        The second convolution halves the frames, rounding up; a lone last row is dropped.
        """
        return (frames + 1) // 2 // 2

    def max_frames(self, tokens: int) -> int:
        return 4 * tokens + 2


AudioConfig = Qwen3AudioConfig | Qwen2_5AudioConfig


def halved_three_times(size: int) -> int:
    """Compute the size after three convolutions of stride 2, each rounding up."""
    return -(-size // 8)
