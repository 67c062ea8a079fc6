# SPDX-License-Identifier: Apache-2.0
"""Simulates a microphone in a room: reverberation, noise, limited bandwidth.

Kinds of rooms, noises and microphones are divided between the splits. All processing is in the frequency
domain, resampling included, and takes about 10 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.words.language import SPLITS
from edgellm_ros.multimodal.sound import Sound

MICROPHONE_RATE = 16000  # Hz
# Ranges: reverberation time in s, direct over reverberant energy in dB, fading frequency of the tail in Hz.
KINDS = {
    "train": {
        "outdoors": ((0.02, 0.10), (15.0, 25.0), (3000, 8000)),
        "bedroom": ((0.20, 0.35), (4.0, 14.0), (1500, 4000)),
        "office": ((0.35, 0.50), (1.0, 10.0), (2500, 6000)),
        "hall": ((0.60, 0.80), (2.0, 9.0), (1500, 5000)),
    },
    "test": {
        "car": ((0.05, 0.15), (6.0, 14.0), (1500, 3000)),
        "kitchen": ((0.30, 0.45), (1.5, 10.0), (4000, 8000)),
        "workshop": ((0.45, 0.65), (2.0, 9.0), (2000, 5000)),
    },
}
MICROPHONES = {  # lowest and highest frequency, Hz
    "train": ((40, 7800), (100, 7000), (200, 6000), (300, 4500)),
    "test": ((70, 7400), (150, 6500), (250, 5200)),
}


@dataclass(frozen=True)
class Room:
    """A room and its microphone."""

    reverberation_time: float  # s, to -60 dB
    direct_db: float  # energy of the direct sound over that of the reflections
    damping_hz: float  # frequency from which the reflections fade
    noise: str  # one of NOISES
    noise_db: float  # level of the speech over the noise
    band: tuple[float, float]  # lowest and highest frequency of the microphone, Hz
    peak_db: float  # loudest speech sample over full scale; above 0 the signal clips
    seed: int  # of the reflections

    def __post_init__(self) -> None:
        if self.noise not in NOISES:
            raise ValueError(f"noise must be one of {', '.join(NOISES)}, got {self.noise!r}")
        if not 0 < self.reverberation_time <= 2:
            raise ValueError(
                f"reverberation_time must be above 0 and at most 2 s, got {self.reverberation_time}"
            )
        low, high = self.band
        if not 0 <= low < high <= MICROPHONE_RATE / 2:
            raise ValueError(f"band must be two rising frequencies from 0 to 8000 Hz, got {self.band}")


def sample_room(rng: Generator, split: str = "train") -> Room:
    """Sample a room of a split; the splits share no kind of room, noise or microphone.

    ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be train or test, got {split!r}")
    kinds = KINDS[split]
    time, direct, damping = kinds[str(rng.choice(list(kinds)))]
    bands = MICROPHONES[split]
    return Room(
        reverberation_time=float(rng.uniform(*time)),
        direct_db=float(rng.uniform(*direct)),
        damping_hz=float(rng.uniform(*damping)),
        noise=str(rng.choice(_NOISES_OF[split])),
        noise_db=float(rng.uniform(6, 35)),
        band=bands[int(rng.integers(len(bands)))],
        peak_db=float(rng.uniform(-30, 2)),
        seed=int(rng.integers(2**31)),
    )


def hear(
    sound: Sound, room: Room, rng: Generator, before: float | None = None, after: float | None = None
) -> Sound:
    """Simulate the recording of a sound in the room: 16 kHz, 16 bit.

    before, after: seconds of the room's noise around the sound; None samples 0.1 to 0.4 s and 0.2 to 0.6 s.
    The noise too is sampled from `rng`.
    """
    before = float(rng.uniform(0.1, 0.4)) if before is None else before
    after = float(rng.uniform(0.2, 0.6)) if after is None else after
    rate = MICROPHONE_RATE
    count = max(1, round((before + sound.seconds + after) * rate))
    # Both transforms span the same time, a multiple of 0.2 s that includes the tail, so that bins match.
    fifths = int(np.ceil((count / rate + room.reverberation_time) * 5)) + 1
    size, source = fifths * (rate // 5), round(fifths * sound.sample_rate / 5)
    start = round(before * sound.sample_rate)
    played = np.zeros(source, np.float32)
    played[start : start + len(sound.samples)] = sound.samples
    spectrum = np.zeros(size // 2 + 1, np.complex64)
    spoken = np.fft.rfft(played)[: len(spectrum)]
    spectrum[: len(spoken)] = spoken * np.float32(size / source)
    frequency = np.fft.rfftfreq(size, 1 / rate).astype(np.float32)
    spectrum *= _reflections(room, size, frequency)
    passed = _band(frequency, *room.band)
    speech = np.fft.irfft(spectrum * passed, size)[:count].astype(np.float32)
    peak = float(np.abs(speech).max())
    if peak > 0:
        speech *= 10 ** (room.peak_db / 20) / peak
    noise = np.fft.irfft(np.fft.rfft(NOISES[room.noise](rng, size)) * passed, size)[:count].astype(np.float32)
    loudness = _loudness(speech) or 10 ** (room.peak_db / 20) / 4
    noise *= loudness * 10 ** (-room.noise_db / 20) / (float(np.sqrt(np.mean(noise**2))) + 1e-12)
    heard = np.clip(speech + noise, -1, 1)
    return Sound(np.rint(heard * 32767).astype(np.float32) / np.float32(32768), rate)


def _reflections(room: Room, size: int, frequency: NDArray) -> NDArray[np.complex64]:
    """Compute the transfer function: direct sound, reflections, a decaying tail."""
    rng = np.random.default_rng(room.seed)
    length = min(size, int(room.reverberation_time * MICROPHONE_RATE) + 1)
    time = np.arange(length, dtype=np.float32) / MICROPHONE_RATE
    response = rng.standard_normal(length, np.float32) * np.exp(-6.9 / room.reverberation_time * time)
    response[: int(0.003 * MICROPHONE_RATE)] = 0
    early = rng.integers(int(0.001 * MICROPHONE_RATE), int(0.02 * MICROPHONE_RATE), 6)
    early = early[early < length]
    response[early] += rng.choice((-1, 1), len(early)) * rng.uniform(2, 8, len(early))
    fading = 1 / (1 + (frequency / np.float32(room.damping_hz)) ** 2)
    reflected = np.fft.rfft(response, size) * fading
    energy = 2 * float(np.sum(np.abs(reflected) ** 2)) / size  # Parseval
    reflected *= 10 ** (-room.direct_db / 20) / (np.sqrt(energy) + 1e-12)
    return (1 + reflected).astype(np.complex64)


def _band(frequency: NDArray, low: float, high: float) -> NDArray[np.float32]:
    """Compute the gain of a microphone that passes `low` to `high` Hz.

    The slope is 12 dB per octave below and steeper above.
    """
    below = 1 / (1 + (low / np.maximum(frequency, 1.0)) ** 2)
    above = 1 / (1 + (frequency / high) ** 12)
    return (below * above).astype(np.float32)


def _loudness(speech: NDArray) -> float:
    """Compute the root mean square of the louder half of a signal's 20 ms pieces.

    Pauses between words therefore have no influence.
    """
    pieces = speech[: len(speech) // 320 * 320].reshape(-1, 320)
    power = np.sort((pieces**2).mean(1))[len(pieces) // 2 :]
    return float(np.sqrt(power.mean())) if len(power) else 0.0


# Each noise: [n] samples at MICROPHONE_RATE, of any loudness.


def _coloured(rng: Generator, n: int, slope: float) -> NDArray:
    """Make noise whose amplitude is proportional to frequency ** slope above 40 Hz."""
    spectrum = np.fft.rfft(rng.standard_normal(n, np.float32))
    frequency = np.fft.rfftfreq(n, 1 / MICROPHONE_RATE)
    return np.fft.irfft(spectrum * np.maximum(frequency, 40) ** slope, n)


def _tones(rng: Generator, n: int, pitch: NDArray, tones: int, slope: float) -> NDArray:
    """Make harmonics of a pitch [n] in Hz.

    Amplitudes are number ** slope, with random factors; phases are random.
    """
    phase = 2 * np.pi * np.cumsum(pitch / MICROPHONE_RATE)
    sound = np.zeros(n)
    for number in range(1, tones + 1):
        sound += number**slope * rng.uniform(0.3, 1) * np.sin(number * phase + rng.uniform(0, 2 * np.pi))
    return sound / (sound.std() + 1e-9)


def _unit(noise: NDArray) -> NDArray:
    return noise / (noise.std() + 1e-12)


def _hum(rng: Generator, n: int) -> NDArray:
    pitch = np.full(n, float(rng.choice((50.0, 60.0))))
    return _tones(rng, n, pitch, 8, -0.7) + 0.3 * _unit(_coloured(rng, n, -0.5))


def _fan(rng: Generator, n: int) -> NDArray:
    time = np.arange(n) / MICROPHONE_RATE
    swell = 1 + 0.3 * np.sin(2 * np.pi * rng.uniform(0.3, 2) * time + rng.uniform(0, 6))
    return swell * _unit(_coloured(rng, n, -0.8)) + 0.3 * _tones(
        rng, n, np.full(n, rng.uniform(80, 200)), 3, -1
    )


def _motor(rng: Generator, n: int) -> NDArray:
    time = np.arange(n) / MICROPHONE_RATE
    pitch = rng.uniform(120, 350) * (1 + 0.15 * np.sin(2 * np.pi * rng.uniform(0.2, 0.8) * time))
    return _tones(rng, n, pitch, 10, -0.6) + 0.5 * _unit(_coloured(rng, n, -0.3))


def _rain(rng: Generator, n: int) -> NDArray:
    drops = np.zeros(n)
    struck = rng.integers(0, n, max(1, n // 400))
    drops[struck] = rng.exponential(1.0, len(struck))
    return _unit(_coloured(rng, n, 0.2)) + 0.7 * _unit(
        np.convolve(drops, np.exp(-np.arange(48) / 8.0), "same")
    )


def _crowd(rng: Generator, n: int) -> NDArray:
    """Make the noise of a distant crowd.

    The noise has the spectrum of speech and a syllable-like envelope.
    """
    time = np.arange(n) / MICROPHONE_RATE
    swell = 1.0
    for _ in range(4):
        swell = swell + 0.35 * np.sin(2 * np.pi * rng.uniform(1.5, 5) * time + rng.uniform(0, 6))
    frequency = np.fft.rfftfreq(n, 1 / MICROPHONE_RATE)
    shape = np.exp(-(((np.log2(np.maximum(frequency, 20)) - np.log2(500)) / 1.3) ** 2))
    return np.abs(swell) * np.fft.irfft(np.fft.rfft(rng.standard_normal(n, np.float32)) * shape, n)


NOISES: dict[str, Callable[[Generator, int], NDArray]] = {
    "hiss": lambda rng, n: _coloured(rng, n, 0.0),
    "rumble": lambda rng, n: _coloured(rng, n, -1.0),
    "air": lambda rng, n: _coloured(rng, n, -0.5),
    "hum": _hum,
    "fan": _fan,
    "motor": _motor,
    "rain": _rain,
    "crowd": _crowd,
}
_NOISES_OF = {"train": ("hiss", "rumble", "air", "hum", "fan"), "test": ("motor", "rain", "crowd")}
