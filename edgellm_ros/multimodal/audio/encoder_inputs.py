# SPDX-License-Identifier: Apache-2.0
"""Inputs of audio encoders: chunks of features, and what a sound's length decides."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.multimodal.audio.config import (
    AudioConfig,
    AudioEncoder,
    Qwen2_5AudioConfig,
    Qwen3AudioConfig,
)


class EncoderInputs(ABC):
    """Owns the tensors that an encoder reads, for sounds of up to `max_tokens` tokens."""

    def __init__(self, config: AudioEncoder, device: Device, max_tokens: int) -> None:
        self._device = device
        self._chunks = -(-max_tokens // config.chunk_tokens)
        shape = (self._chunks, config.num_mel_bins, config.chunk_frames)
        self._features = device.empty(shape, np.float32)
        # Only the last chunk of a sound is padded, so its tokens are the first rows, whatever its length.
        self._token_index = device.empty((max_tokens,), np.int64)
        device.upload(self._token_index, np.arange(max_tokens))

    def upload(
        self, chunks: np.ndarray, frames: int, tokens: int, computed: int
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Upload the inputs of a run; return them and the sizes of their dimensions.

        chunks: [N, mel bins, T] float32; frames, tokens: of the sound; computed: number of rows of the run,
        of which those from `tokens` on are padding.
        """
        features = self._features.view(*chunks.shape)
        self._device.upload(features, chunks)
        tensors = {
            "input_features": features,
            "token_index": self._token_index.rows(0, computed),
            **self._masks(chunks, frames, tokens, computed),
        }
        return tensors, {"N": chunks.shape[0], "T": chunks.shape[2], "A": computed}

    @abstractmethod
    def _masks(self, chunks: np.ndarray, frames: int, tokens: int, computed: int) -> dict[str, Tensor]:
        """Upload the other inputs than features and token indices; see `upload`."""


class WindowInputs(EncoderInputs):
    """Inputs of encoders whose tokens attend within windows of several chunks."""

    def __init__(self, config: Qwen3AudioConfig, device: Device, max_tokens: int) -> None:
        super().__init__(config, device, max_tokens)
        self._config = config
        self._mask = device.empty((max_tokens, max_tokens), np.bool_)
        self._position_index = device.empty((max_tokens,), np.int64)
        device.upload(self._position_index, np.arange(max_tokens) % config.chunk_tokens)

    def _masks(self, chunks: np.ndarray, frames: int, tokens: int, computed: int) -> dict[str, Tensor]:
        mask = self._mask.view(1, 1, computed, computed)
        self._device.upload(mask, window_mask(computed, self._config, tokens)[None, None])
        return {
            "attention_mask": mask,
            "position_index": self._position_index.rows(0, computed),
        }


class ChunkInputs(EncoderInputs):
    """Inputs of encoders whose rows attend within their chunk."""

    def __init__(self, config: Qwen2_5AudioConfig, device: Device, max_tokens: int) -> None:
        super().__init__(config, device, max_tokens)
        rows = config.n_window
        self._frame_mask = device.empty((self._chunks, 1, config.chunk_frames), np.float32)
        self._mask = device.empty((self._chunks, 1, rows, rows), np.bool_)

    def _masks(self, chunks: np.ndarray, frames: int, tokens: int, computed: int) -> dict[str, Tensor]:
        frame_mask, mask = self._frame_mask.rows(0, len(chunks)), self._mask.rows(0, len(chunks))
        filled, visible = chunk_masks(len(chunks), chunks.shape[2], frames)
        self._device.upload(frame_mask, filled)
        self._device.upload(mask, visible)
        return {"frame_mask": frame_mask, "attention_mask": mask}


def make_inputs(config: AudioConfig, device: Device, max_tokens: int) -> EncoderInputs:
    """Make the inputs of an encoder of this kind."""
    if isinstance(config, Qwen3AudioConfig):
        return WindowInputs(config, device, max_tokens)
    return ChunkInputs(config, device, max_tokens)


def split_chunks(features: np.ndarray, chunk_frames: int, whole: bool = False) -> np.ndarray:
    """Split features [M, frames] into chunks [N, M, chunk_frames].

    The last chunk is padded with zeros. `whole`: also if it is the only one; otherwise a single chunk keeps
    its own length. The padding changes what the convolutions compute, so each family does as its reference.
    """
    bins, frames = features.shape
    if frames <= chunk_frames and not whole:
        return features[None]
    count = -(-frames // chunk_frames)
    padded = np.pad(features, ((0, 0), (0, count * chunk_frames - frames)))
    return np.ascontiguousarray(padded.reshape(bins, count, chunk_frames).transpose(1, 0, 2))


def window_mask(computed: int, config: Qwen3AudioConfig, tokens: int | None = None) -> np.ndarray:
    """Make the attention mask [computed, computed] bool.

    The mask is true inside a window of n_window_infer frames. tokens: of the sound; only padding attends to
    what is after them. None = all.
    """
    window = config.chunk_tokens * (config.n_window_infer // config.chunk_frames)
    numbers = np.arange(computed)
    padding = numbers >= (computed if tokens is None else tokens)
    windows = numbers // window + computed * padding  # the padding is in windows of its own
    return windows[:, None] == windows


def chunk_masks(count: int, chunk_frames: int, frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Make the masks of a sound of `frames` frames in `count` chunks.

    Returns which frames are sound [count, 1, chunk_frames] float32, and which rows of a chunk, each made of
    two frames, its rows attend to [count, 1, R, R] bool: all R rows, those of padding too, attend to the rows
    that have sound.
    """
    filled = (np.arange(count * chunk_frames) < frames).reshape(count, 1, chunk_frames)
    visible = filled[:, :, None, ::2].repeat(chunk_frames // 2, axis=2)
    return filled.astype(np.float32), visible
