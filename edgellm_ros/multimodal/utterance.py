# SPDX-License-Identifier: Apache-2.0
"""Cuts what somebody says out of a stream of sound.

    speech       ______####_###_#####________________________
    utterance      [pre-roll  speech  pre-roll]
                                        ^ cut here, when the silence has lasted for the hang-over

Only samples count, in frames of 32 ms from the stream's start: however the stream is cut into pieces, the
same sound gives the same utterances.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgellm_ros.multimodal.voice_activity import FRAME, VOICE_RATE

FRAME_S = FRAME / VOICE_RATE
# The share of the threshold below which speech has ended. With thresholds of 0.3 to 0.4, of 1,000 sentences
# in the arena's rooms (noise 6 to 35 dB below the voice) 991 to 994 are cut out whole; of 27 minutes of its
# noises alone, only a motor at -6 dBFS is ever taken for speech.
END_SHARE = 0.8
# The detector starts afresh in longer silence: used to a noise, it gets hard of hearing (after 15 s of noise
# it cut 4 of 100 sentences short, and missed one when it starts afresh).
AFRESH_S = 4.0
# Why an utterance ended.
SILENCE, MAX_LENGTH, STREAM_END = "silence", "max_length", "stream_end"


@dataclass(frozen=True)
class UtteranceSettings:
    """When an utterance begins and ends; times in seconds.

    threshold: probability from which a frame is speech. pre_roll: sound kept before the first frame of
    speech, and behind the last. hang_over: silence that ends an utterance. min_speech: with less of it, it
    was a noise. max_length: an utterance is ended there, and what follows is skipped up to the next silence.
    """

    threshold: float = 0.35
    pre_roll: float = 0.3
    hang_over: float = 0.8
    min_speech: float = 0.16
    max_length: float = 10.0

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
    """One utterance: samples [N] float32 at 16 kHz, the index of the first one in the stream, and why it
    ended.
    """

    samples: np.ndarray
    start: int
    reason: str


class VoiceDetector(Protocol):
    """What says how probable speech is: `VoiceActivity`, in tests a script."""

    def reset(self) -> None: ...

    def probability(self, frame: np.ndarray) -> float: ...


class UtteranceCutter:
    """Takes a stream at 16 kHz piece by piece. `settings` may be replaced at any time.

    `dropped` counts what was cut and had too little speech in it.
    """

    def __init__(self, voice: VoiceDetector, settings: UtteranceSettings) -> None:
        self.settings = settings
        self.dropped = 0
        self._voice = voice
        self._restart()

    @property
    def speaking(self) -> bool:
        """Whether an utterance has begun and not ended."""
        return self._speaking

    def add(self, samples: np.ndarray) -> list[Cut]:
        """The utterances that end within the next samples [N] float32."""
        if self._rest.size:
            samples = np.concatenate([self._rest, samples])
        whole = len(samples) // FRAME * FRAME
        self._rest = samples[whole:].copy()
        cuts = (self._take(samples[start : start + FRAME].copy()) for start in range(0, whole, FRAME))
        return [cut for cut in cuts if cut is not None]

    def end(self) -> list[Cut]:
        """End the stream here: the utterance that has begun, if any. What comes next is another stream."""
        cut = None
        if self._speaking:
            if self._rest.size and self._silence <= self._padding:
                self._frames.append(self._rest)
            cut = self._finish(STREAM_END)
        self._restart()
        return [] if cut is None else [cut]

    def drop(self) -> bool:
        """Forget the stream. True if an utterance had begun, which is lost."""
        lost = self._speaking
        self._restart()
        return lost

    @property
    def _padding(self) -> int:
        """Frames of the pre-roll."""
        return math.ceil(self.settings.pre_roll / FRAME_S)

    def _restart(self) -> None:
        self._voice.reset()
        self._rest = np.zeros(0, np.float32)
        self._position = 0  # of the next frame, in samples from the stream's start
        self._speaking = self._deaf = False
        self._frames: deque[np.ndarray] = deque()  # the pre-roll, or the utterance so far
        self._start = 0  # of the utterance
        self._speech = self._silence = 0  # frames of speech in it, and frames of silence lately

    def _take(self, frame: np.ndarray) -> Cut | None:
        settings = self.settings
        probability = self._voice.probability(frame)
        self._position += FRAME
        self._frames.append(frame)
        self._silence = self._silence + 1 if probability < END_SHARE * settings.threshold else 0
        quiet = self._silence * FRAME_S >= settings.hang_over
        is_speech = probability >= settings.threshold
        cut = None
        if self._deaf:
            self._deaf = not quiet
        elif self._speaking:
            self._speech += is_speech
            if quiet:
                cut = self._finish(SILENCE)
            elif (len(self._frames) + 1) * FRAME_S > settings.max_length:
                cut = self._finish(MAX_LENGTH)
                self._deaf = True
        elif is_speech:
            self._speaking, self._speech = True, 1
            self._start = self._position - FRAME * len(self._frames)
        if not self._speaking:
            while len(self._frames) > self._padding:
                self._frames.popleft()
            if self._silence and self._silence % round(AFRESH_S / FRAME_S) == 0:
                self._voice.reset()
        return cut

    def _finish(self, reason: str) -> Cut | None:
        """The utterance so far, but for the silence behind it that is longer than the pre-roll."""
        self._speaking = False
        if self._speech * FRAME_S < self.settings.min_speech:
            self.dropped += 1
            return None
        frames = list(self._frames)
        beyond = max(0, self._silence - self._padding)
        return Cut(np.concatenate(frames[: len(frames) - beyond]), self._start, reason)
