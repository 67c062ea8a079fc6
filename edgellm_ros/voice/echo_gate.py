# SPDX-License-Identifier: Apache-2.0
"""Keeps the robot's own voice out of its microphone, unless a person interrupts.

    played: level of the robot's sound, with times --+
                                                     v
    microphone -> frames of 32 ms -> level, speech probability -> OPEN, CLOSED or BARGE_IN

While the robot speaks, and for `tail` seconds after, the gate is closed. The echo's gain is measured: the
95th percentile of (microphone's level - robot's level) over the last 200 frames in which the gate was closed.
A person interrupts (barge-in) when 3 of 4 frames in a row are speech and louder than both the expected echo
and the noise of the room by `barge_in` dB. The detector is reset where the sound becomes louder: the echo is
speech too, and noise beside it would be taken for speech. There is no barge-in before 30 frames, 1 s of the
robot's sound, were measured.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np
import soxr
from numpy.typing import NDArray

from edgellm_ros.multimodal.audio.utterance import VoiceDetector
from edgellm_ros.multimodal.audio.voice_activity import FRAME, VOICE_RATE

FRAME_S = FRAME / VOICE_RATE
QUIETEST = -90.0  # dB of full scale
AUDIBLE = -50.0  # the gain is measured while the robot's level is above
ECHO_S = 0.5  # delay of playback and reverberation: the echo of a sound is heard for so long
EARLY_S = 0.05  # by which clocks and buffers may make it seem early
MEMORY_S = 3.0
MEASURED, FEWEST, PERCENTILE = 200, 30, 95  # frames
NOISE_FRAMES, NOISE_PERCENTILE, DEFAULT_NOISE = 100, 20, -60.0
WINDOW, NEEDED = 4, 3  # frames


class Hearing(Enum):
    """What becomes of a chunk of the microphone's sound."""

    OPEN = "the robot is silent"
    CLOSED = "the robot speaks"
    BARGE_IN = "a person interrupts the robot"


@dataclass(frozen=True)
class EchoSettings:
    """When the gate closes, and what opens it."""

    barge_in: float = 6.0  # dB above echo and noise; negative = no barge-in
    tail: float = 0.3  # s after the robot's sound


class EchoGate:
    """Thread-safe: the robot's sound and the microphone's come on different threads.

    Times are those of `time.monotonic`.
    """

    def __init__(self, detector: VoiceDetector, threshold: float) -> None:
        """Start open. threshold: speech probability from which a frame is speech."""
        self._detector, self._threshold = detector, threshold
        self._lock = threading.Lock()
        self._played: deque[tuple[float, float]] = deque()  # time and level in dB of blocks
        self._from = self._until = -math.inf  # of the robot's sound
        self._interrupted = False  # since a barge-in, until the robot is silent
        self._gains: deque[float] = deque(maxlen=MEASURED)
        self._noise: deque[float] = deque(maxlen=NOISE_FRAMES)
        self._hits: deque[bool] = deque(maxlen=WINDOW)
        self._was_loud = False  # whether the last frame was louder than echo and noise
        self._rate = 0
        self._rest: NDArray[np.float32] = np.zeros(0, np.float32)

    @property
    def gain(self) -> float:
        """The echo's gain in dB; NaN before it was measured."""
        with self._lock:
            return self._gain()

    def played(self, samples: NDArray[np.int16], sample_rate: int, time: float) -> None:
        """Note that the robot's sound [N] begins at `time`.

        No samples: the robot is silent from then on.
        """
        with self._lock:
            if not samples.size:
                self._until = min(self._until, time)
                self._interrupted = False
            elif not self._interrupted:
                block = round(FRAME_S * sample_rate)
                for start in range(0, samples.size, block):
                    level = _level(samples[start : start + block].astype(np.float32) / np.float32(32768))
                    self._played.append((time + start / sample_rate, level))
                if self._until < time - ECHO_S:  # no pause between sentences
                    self._from = time
                self._until = time + samples.size / sample_rate
                while self._played and self._played[0][0] < time - MEMORY_S:
                    self._played.popleft()

    def hear(
        self, samples: NDArray[np.float32], sample_rate: int, arrival: float, settings: EchoSettings
    ) -> Hearing:
        """Judge a chunk of the microphone [N], full scale -1..1, that has arrived now."""
        with self._lock:
            begin = arrival - len(samples) / sample_rate
            closed = begin < self._until + settings.tail and arrival > self._from
            frames = self._frames(samples, sample_rate)
            levels = [_level(frame) for frame in frames]
            if not closed:
                self._noise.extend(levels)
                self._hits.clear()
                return Hearing.OPEN
            gain, noise = self._gain(), self._noise_level()
            first = arrival - (len(frames) * FRAME + self._rest.size) / VOICE_RATE
            for number, (frame, level) in enumerate(zip(frames, levels, strict=True)):
                robot = self._robot_level(first + number * FRAME_S)
                if robot > AUDIBLE:
                    self._gains.append(level - robot)
                is_louder = level > max(noise, robot + gain) + settings.barge_in and not math.isnan(gain)
                if is_louder and not self._was_loud:
                    self._detector.reset()
                is_speech = is_louder and self._detector.probability(frame) >= self._threshold
                self._hits.append(is_speech)
                self._was_loud = is_louder
                if sum(self._hits) >= NEEDED and settings.barge_in >= 0:
                    self._interrupted, self._until = True, -math.inf
                    self._hits.clear()
                    return Hearing.BARGE_IN
            return Hearing.CLOSED

    def _gain(self) -> float:
        if len(self._gains) < FEWEST:
            return math.nan
        return float(np.percentile(self._gains, PERCENTILE))

    def _noise_level(self) -> float:
        if len(self._noise) < FEWEST:
            return DEFAULT_NOISE
        return float(np.percentile(self._noise, NOISE_PERCENTILE))

    def _robot_level(self, time: float) -> float:
        """Return the highest level of the robot whose echo may be heard in a frame."""
        heard = (level for at, level in self._played if time - ECHO_S <= at <= time + FRAME_S + EARLY_S)
        return max(heard, default=QUIETEST)

    def _frames(self, samples: NDArray[np.float32], sample_rate: int) -> list[NDArray[np.float32]]:
        """Return the whole frames at 16 kHz that end within a chunk."""
        if sample_rate != self._rate:
            self._rate, self._rest = sample_rate, np.zeros(0, np.float32)
            self._resampler = soxr.ResampleStream(sample_rate, VOICE_RATE, 1, dtype=np.float32)
        if sample_rate != VOICE_RATE:
            samples = self._resampler.resample_chunk(samples)
        samples = np.concatenate([self._rest, samples])
        whole = samples.size // FRAME * FRAME
        self._rest = samples[whole:]
        return list(samples[:whole].reshape(-1, FRAME))


def _level(samples: NDArray[np.float32]) -> float:
    """Return the level of samples in dB of full scale."""
    power = float(np.mean(np.square(samples), dtype=np.float64)) if samples.size else 0.0
    return max(QUIETEST, 10 * math.log10(power)) if power > 0 else QUIETEST
