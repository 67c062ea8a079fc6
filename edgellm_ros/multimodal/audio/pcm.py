# SPDX-License-Identifier: Apache-2.0
"""Decodes raw sound from drivers and checks all fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.echo import quoted
from edgellm_ros.multimodal.sound import MAX_AMPLITUDE, MAX_SAMPLE_RATE, MIN_SAMPLE_RATE, Sound

# Type of a sample, and the value that is full scale.
ENCODINGS: dict[str, tuple[np.dtype, float]] = {
    "S16LE": (np.dtype("<i2"), 32768.0),
    "F32LE": (np.dtype("<f4"), 1.0),
}


@dataclass(frozen=True)
class PcmFormat:
    """Format of raw sound. ValueError for a format that is not supported."""

    encoding: str  # a key of ENCODINGS
    sample_rate: int  # Hz
    channels: int  # 1 (mono) or 2 (stereo)

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ValueError(
                f"sound encoding {quoted(self.encoding)} is not supported; use one of {', '.join(ENCODINGS)}"
            )
        if not MIN_SAMPLE_RATE <= self.sample_rate <= MAX_SAMPLE_RATE:
            raise ValueError(
                f"sample_rate must be from {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} Hz, got {self.sample_rate}"
            )
        if self.channels not in (1, 2):
            raise ValueError(f"channels must be 1 (mono) or 2 (stereo), got {self.channels}")

    def __str__(self) -> str:
        return f"{self.encoding} at {self.sample_rate} Hz with {self.channels} channel(s)"

    def decode(self, data: Any) -> np.ndarray:
        """Decode raw bytes (any buffer) to samples [N] float32, full scale -1..1.

        Stereo is averaged. ValueError for an incomplete sample, NaN, infinity, or another scale.
        """
        dtype, full_scale = ENCODINGS[self.encoding]
        data = memoryview(data)
        frame = dtype.itemsize * self.channels
        if data.nbytes % frame:
            raise ValueError(
                f"sound has {data.nbytes} bytes, not a multiple of {frame}: "
                f"{self.channels} channel(s) of {dtype.itemsize} bytes"
            )
        values = np.frombuffer(data, dtype).astype(np.float32)
        if self.encoding == "F32LE" and values.size:
            peak = max(-float(values.min()), float(values.max()))
            if not peak <= MAX_AMPLITUDE:  # false for NaN as well
                raise ValueError(f"F32LE sound must be finite, with full scale -1..1, got a peak of {peak:g}")
        values /= np.float32(full_scale)
        return values if self.channels == 1 else (values[0::2] + values[1::2]) / np.float32(2)


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Convert samples [N] of full scale -1..1 to little-endian 16-bit integers.

    What was decoded from 16 bits loses nothing; what is beyond full scale is clipped.
    """
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype("<i2")


def join(chunks: Sequence[tuple[PcmFormat, Any]]) -> Sound:
    """Join chunks (format and raw bytes) into one sound.

    ValueError for no chunks, different formats, a chunk that cannot be decoded, and a sound without samples.
    """
    if not chunks:
        raise ValueError("a sound needs at least one chunk, got none")
    first = chunks[0][0]
    samples = []
    for index, (pcm, data) in enumerate(chunks):
        if pcm != first:
            raise ValueError(
                f"chunk {index} is {pcm}, but chunk 0 is {first}: expected equal formats in one sound"
            )
        samples.append(pcm.decode(data))
    joined = np.concatenate(samples)
    if not joined.size:
        raise ValueError("the sound is empty: 0 bytes of data")
    return Sound(joined, first.sample_rate)
