# SPDX-License-Identifier: Apache-2.0
"""Configuration of the audio encoder and its feature extractor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AudioConfig:
    """Audio encoder of Qwen3-Omni and Qwen3-ASR, with Whisper's feature extractor."""

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
    min_samples: int = 0  # a shorter sound is extended with silence, which counts as sound; 0 = not extended
    whole_chunks: bool = False  # pad a single chunk to its full length too, before the convolutions

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("min_samples", "whole_chunks") else 1
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
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
        return 2 * self.n_window

    @property
    def chunk_tokens(self) -> int:
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
