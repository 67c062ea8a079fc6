# SPDX-License-Identifier: Apache-2.0
"""Computes log-mel features of a sound like the checkpoint's feature extractor.

Reference: transformers, WhisperFeatureExtractor (log of the power in mel bands, clamped to 80 dB below the
sound's loudest value) as Qwen3OmniMoeProcessor calls it for one sound, without padding or truncation, or as
Qwen2_5OmniProcessor does, which puts zeros after the sound (`AudioConfig.ends_in_silence`). The reference
computes in float32, this module in float64; the two differ by the reference's rounding.
"""

from __future__ import annotations

import numpy as np
import soxr

from edgellm_ros.multimodal.audio.config import AudioConfig
from edgellm_ros.multimodal.sound import Sound

FLOOR = 1e-10  # power that counts as silence
RANGE = 8.0  # decades of power below the loudest value
MAX_FREQUENCY = 8000.0  # Hz; where the mel bands end, a constant in the extractor
BLOCK = 100  # frames analysed at once: they fit into the CPU's cache


class AudioProcessor:
    """Resamples sounds and computes their features."""

    def __init__(self, config: AudioConfig) -> None:
        self._config = config
        self._window = np.hanning(config.n_fft + 1)[:-1]  # periodic
        self._filters = mel_filters(config.num_mel_bins, config.n_fft, config.sampling_rate)

    def num_frames(self, sound: Sound) -> int:
        """Compute the number of frames of a sound from its length.

        There is one frame per `hop_length` samples. ValueError if the argument is not a Sound, or too short
        for the encoder and not extended.
        """
        if not isinstance(sound, Sound):
            raise ValueError(f"audio must be Sound objects, got {type(sound).__name__}")
        config, rate = self._config, sound.sample_rate
        samples = (2 * len(sound.samples) * config.sampling_rate + rate) // (2 * rate)  # soxr's rounding
        samples = max(samples, config.min_samples)
        if samples < config.shortest:
            raise ValueError(
                f"a sound of {sound.seconds:.3f} s is too short, expected more than "
                f"{(config.shortest - 1) / config.sampling_rate:.4f} s"
            )
        return config.num_frames(samples)

    def process(self, sound: Sound) -> np.ndarray:
        """Compute log-mel features [mel bins, frames] float32. ValueError as `num_frames`."""
        config, count = self._config, self.num_frames(sound)
        samples = sound.samples
        if sound.sample_rate != config.sampling_rate:
            samples = soxr.resample(samples, sound.sample_rate, config.sampling_rate)
        samples = np.pad(samples.astype(np.float64), (0, max(0, config.min_samples - len(samples))))
        half = config.n_fft // 2
        if config.ends_in_silence:
            samples = np.pad(samples, (0, half))
        padded = np.pad(samples, half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, config.n_fft)[:: config.hop_length]
        decades = np.empty((config.num_mel_bins, count))
        for start in range(0, count, BLOCK):
            block = slice(start, min(start + BLOCK, count))
            spectrum = np.fft.rfft(frames[block] * self._window)
            power = self._filters @ (spectrum.real**2 + spectrum.imag**2).T
            decades[:, block] = np.log10(np.maximum(power, FLOOR))
        return ((np.maximum(decades, decades.max() - RANGE) + 4.0) / 4.0).astype(np.float32)


def mel_filters(bins: int, n_fft: int, sampling_rate: int) -> np.ndarray:
    """Make triangular mel filters [bins, n_fft / 2 + 1].

    Filters are evenly spaced in mel and of equal area (Slaney).
    """
    edges = _mel_to_hertz(np.linspace(0.0, _hertz_to_mel(MAX_FREQUENCY), bins + 2))
    frequencies = np.linspace(0, sampling_rate // 2, n_fft // 2 + 1)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return np.maximum(0, np.minimum(rising, falling)) * 2.0 / (high - low)


# Slaney's mel scale: 3 mel per 200 Hz up to 1 kHz (15 mel), from there 27 mel per factor of 6.4.
def _hertz_to_mel(frequency: float) -> float:
    return 15.0 + 27.0 * np.log(frequency / 1000.0) / np.log(6.4)


def _mel_to_hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15.0, mel * 200.0 / 3.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mel - 15.0)))
