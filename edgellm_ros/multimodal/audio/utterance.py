# SPDX-License-Identifier: Apache-2.0
"""Finds utterances in a stream of sound.

    speech       ______####_###_#####________________________
    utterance      [pre-roll  speech  pre-roll]
                                        ^ cut here, when the silence has lasted for the hang-over

Time is counted in frames of 32 ms from the stream's start, so the same sound gives the same utterances
however it is divided into chunks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgellm_ros.multimodal.audio.voice_activity import FRAME, VOICE_RATE

FRAME_S = FRAME / VOICE_RATE
# The share of the threshold below which speech has ended. With thresholds of 0.3 to 0.4, of 1,000 sentences
# in the arena's rooms (noise 6 to 35 dB below the voice) 991 to 994 are found complete; in 27 minutes of its
# noises alone, only a motor at -6 dBFS is taken for speech.
END_SHARE = 0.8
# The detector is reset in longer silence, because it misses speech after long noise. After 15 s of noise, it
# truncated 4 of 100 sentences without resets, and missed one with resets.
RESET_S = 4.0
# Why an utterance ended.
SILENCE, MAX_LENGTH, STREAM_END = "silence", "max_length", "stream_end"


@dataclass(frozen=True)
class UtteranceSettings:
    """When an utterance starts and ends; times in seconds."""

    threshold: float = 0.35  # probability from which a frame is speech
    pre_roll: float = 0.3  # sound included before the first and after the last frame of speech
    hang_over: float = 0.8  # silence that ends an utterance
    min_speech: float = 0.16  # an utterance with less speech is dropped as noise
    max_length: float = 10.0  # an utterance ends here; the sound up to the next silence is skipped

    def __post_init__(self) -> None:
        limits = {  # the longest pre-roll leaves half of the shortest maximum to speech
            "threshold": (0.05, 0.95),
            "pre_roll": (0.0, 0.5),
            "hang_over": (0.1, 5.0),
            "min_speech": (0.0, 2.0),
            "max_length": (1.0, 60.0),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low:g} to {high:g}, got {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class Cut:
    """One utterance."""

    samples: np.ndarray  # [N] float32 at 16 kHz
    start: int  # index of the first sample in the stream
    reason: str  # why the utterance ended; "" = it is in progress


class VoiceDetector(Protocol):
    """Estimates the probability of speech: `VoiceActivity`, or a script in tests."""

    def reset(self) -> None: ...

    def probability(self, frame: np.ndarray) -> float: ...


class UtteranceCutter:
    """Cuts utterances out of a stream at 16 kHz.

    `settings` may be replaced at any time. `dropped` counts utterances dropped because of too little speech.
    """

    def __init__(self, voice: VoiceDetector, settings: UtteranceSettings) -> None:
        self.settings = settings
        self.dropped = 0
        self._voice = voice
        self._rest: np.ndarray = np.zeros(0, np.float32)
        self._restart()

    @property
    def speaking(self) -> bool:
        """Return whether an utterance is in progress."""
        return self._speaking

    def so_far(self) -> Cut | None:
        """Return the utterance in progress, without an end reason; None without one."""
        return Cut(np.concatenate(list(self._frames)), self._start, "") if self._speaking else None

    def add(self, samples: np.ndarray) -> list[Cut]:
        """Add samples [N] float32 and return the utterances that end within them."""
        if self._rest.size:
            samples = np.concatenate([self._rest, samples])
        whole = len(samples) // FRAME * FRAME
        self._rest = samples[whole:].copy()
        cuts = (self._take(samples[start : start + FRAME].copy()) for start in range(0, whole, FRAME))
        return [cut for cut in cuts if cut is not None]

    def end(self) -> list[Cut]:
        """End the stream and return the utterance in progress, if any."""
        cut = None
        if self._speaking:
            if self._rest.size and self._silence <= self._padding:
                self._frames.append(self._rest)
            cut = self._finish(STREAM_END)
        self._restart()
        return [] if cut is None else [cut]

    def drop(self) -> bool:
        """Drop the stream; return True if this dropped an utterance in progress."""
        lost = self._speaking
        self._restart()
        return lost

    @property
    def _padding(self) -> int:
        """Return the number of frames of the pre-roll."""
        return math.ceil(self.settings.pre_roll / FRAME_S)

    def _restart(self) -> None:
        self._voice.reset()
        self._rest = np.zeros(0, np.float32)
        self._position = 0  # of the next frame, in samples from the stream's start
        self._speaking = False
        self._skipping = False  # after max_length, until the next silence
        self._frames: deque[np.ndarray] = deque()  # the pre-roll, or the utterance so far
        self._start = 0  # of the utterance
        self._speech = 0  # frames of speech in the utterance
        self._silence = 0  # frames of silence at its end

    def _take(self, frame: np.ndarray) -> Cut | None:
        settings = self.settings
        probability = self._voice.probability(frame)
        self._position += FRAME
        self._frames.append(frame)
        self._silence = self._silence + 1 if probability < END_SHARE * settings.threshold else 0
        quiet = self._silence * FRAME_S >= settings.hang_over
        is_speech = probability >= settings.threshold
        cut = None
        if self._skipping:
            self._skipping = not quiet
        elif self._speaking:
            self._speech += is_speech
            if quiet:
                cut = self._finish(SILENCE)
            elif (len(self._frames) + 1) * FRAME_S > settings.max_length:
                cut = self._finish(MAX_LENGTH)
                self._skipping = True
        elif is_speech:
            self._speaking, self._speech = True, 1
            self._start = self._position - FRAME * len(self._frames)
        if not self._speaking:
            while len(self._frames) > self._padding:
                self._frames.popleft()
            if self._silence and self._silence % round(RESET_S / FRAME_S) == 0:
                self._voice.reset()
        return cut

    def _finish(self, reason: str) -> Cut | None:
        """Finish the utterance in progress.

        The silence after it is included up to the length of the pre-roll.
        """
        self._speaking = False
        if self._speech * FRAME_S < self.settings.min_speech:
            self.dropped += 1
            return None
        frames = list(self._frames)
        beyond = max(0, self._silence - self._padding)
        return Cut(np.concatenate(frames[: len(frames) - beyond]), self._start, reason)
