# SPDX-License-Identifier: Apache-2.0
"""Cuts a microphone's stream of chunks of any size into utterances.

    chunk (bytes, format, stamp) -> samples, mono -> 16 kHz -> UtteranceCutter -> Utterance

Utterances depend only on the chunks and their stamps. No clock is read, and resampling is streaming, so the
same sound gives the same samples however it is divided into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr

from edgellm_ros.multimodal.audio.pcm import PcmFormat
from edgellm_ros.multimodal.audio.utterance import Cut, UtteranceCutter, UtteranceSettings, VoiceDetector
from edgellm_ros.multimodal.audio.voice_activity import VOICE_RATE
from edgellm_ros.multimodal.sound import MAX_AMPLITUDE, Sound

NANOSECONDS = 1_000_000_000
MAX_CHUNK_S = 30.0  # bounds the work of one callback to about 0.2 s
# Largest difference between a chunk's stamp and the end of the previous chunk; above it, a new stream starts.
MAX_JUMP_NS = NANOSECONDS // 2
MAX_LATENCY_NS = NANOSECONDS  # largest delay of a chunk relative to other sensors' messages


@dataclass(frozen=True, eq=False)
class Utterance:
    """One utterance.

    Stamps are in nanoseconds, 0 if the stream is not stamped.
    """

    sound: Sound  # at 16 kHz
    stamp: int  # stamp of the first sample
    until: int  # stamp of the end of the chunk that ended the utterance
    reason: str  # why it ended: `silence`, `max_length` or `stream_end`; "" = it is in progress


def utterances_in(recording: Sound, voice: VoiceDetector, settings: UtteranceSettings) -> list[Utterance]:
    """Find the utterances of a recording as in a microphone's stream."""
    stream = SoundStream(voice, settings)
    size = int(MAX_CHUNK_S * recording.sample_rate)
    chunks = (recording.samples[start : start + size] for start in range(0, len(recording.samples), size))
    heard = [u for chunk in chunks for u in stream.add("F32LE", recording.sample_rate, 1, chunk.tobytes(), 0)]
    return heard + stream.add("F32LE", recording.sample_rate, 1, b"", 0)


class SoundStream:
    """The stream of one microphone.

    After a jump of the stamps or an error, the next chunk starts a new stream.
    """

    def __init__(self, voice: VoiceDetector, settings: UtteranceSettings) -> None:
        self._cutter = UtteranceCutter(voice, settings)
        self._begin(None)

    @property
    def settings(self) -> UtteranceSettings:
        """Settings of the cutter; may be replaced at any time."""
        return self._cutter.settings

    @settings.setter
    def settings(self, settings: UtteranceSettings) -> None:
        self._cutter.settings = settings

    @property
    def patience(self) -> float:
        """Return the seconds without chunks after which an utterance counts as complete."""
        return self.settings.hang_over + 2 * MAX_LATENCY_NS / NANOSECONDS

    @property
    def dropped(self) -> int:
        """Return the number of utterances dropped so far because of too little speech."""
        return self._cutter.dropped

    def add(self, encoding: str, sample_rate: int, channels: int, data: Any, stamp: int) -> list[Utterance]:
        """Add a chunk and return the utterances that end in it.

        stamp: nanoseconds, 0 = not stamped. A chunk without data ends the stream and completes the utterance
        in progress. ValueError for a chunk that cannot be decoded, is too long, or differs in format from the
        previous chunk. The error ends the stream and drops the utterance in progress, because half a sentence
        may have another meaning.
        """
        if not len(data):
            return self._end()
        try:
            pcm = PcmFormat(encoding, sample_rate, channels)
            samples = pcm.decode(data)
            seconds = len(samples) / sample_rate
            if seconds > MAX_CHUNK_S:
                raise ValueError(
                    f"expected a chunk of at most {MAX_CHUNK_S:g} s of sound, got {seconds:.1f} s"
                )
            jumped = self._jumped(stamp)
            if self._format not in (None, pcm) and not jumped:
                raise ValueError(f"the format changed within the stream from {self._format} to {pcm}")
        except ValueError as error:
            raise ValueError(f"{error}{self._break_off()}") from None
        ended = self._end() if jumped else []
        if self._format is None:
            self._begin(pcm)
        self._received += len(samples)
        self._chunk_ns = round(seconds * NANOSECONDS)
        self._until = stamp + self._chunk_ns if stamp else 0
        self._overdue = False
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        return ended + [self._utterance(cut) for cut in self._cutter.add(samples)]

    def time_passed(self, stamp: int) -> list[Utterance]:
        """Return the utterance in progress if no more chunks arrive.

        `stamp` (ns) is from another sensor. Two stamps in a row far beyond the newest chunk mean that no more
        chunks will arrive; a single stamp may have overtaken chunks in a queue.
        """
        if not self._cutter.speaking or not self._until:
            return []
        silence = stamp - self._until - self._chunk_ns  # a chunk is sent after its last sample
        if silence <= self.settings.hang_over * NANOSECONDS + MAX_LATENCY_NS:
            return []
        overdue, self._overdue = self._overdue, True
        return self._end() if overdue else []

    def so_far(self) -> Utterance | None:
        """Return the received part of the utterance in progress; None without one."""
        cut = self._cutter.so_far()
        return None if cut is None else self._utterance(cut)

    def drop(self) -> None:
        """Drop the stream and the utterance in progress."""
        self._break_off()

    def _begin(self, pcm: PcmFormat | None) -> None:
        self._format = pcm
        self._received = 0  # samples of the stream
        self._until = 0  # stamp of the end of the received samples
        self._chunk_ns = 0  # duration of the newest chunk, ns
        self._overdue = False  # whether another sensor is far beyond it
        self._resampler = None
        if pcm is not None and pcm.sample_rate != VOICE_RATE:
            self._resampler = soxr.ResampleStream(pcm.sample_rate, VOICE_RATE, 1, dtype=np.float32)

    def _jumped(self, stamp: int) -> bool:
        return bool(stamp and self._until) and abs(stamp - self._until) > MAX_JUMP_NS

    def _end(self) -> list[Utterance]:
        """End the stream and return the utterance in progress, if any."""
        cuts = []
        if self._resampler is not None and self._received:
            cuts = self._cutter.add(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        ended = [self._utterance(cut) for cut in cuts + self._cutter.end()]
        self._begin(None)
        return ended

    def _break_off(self) -> str:
        """Drop the stream; return a note for the error if an utterance was in progress."""
        lost = self._cutter.drop()
        self._begin(None)
        return "; the utterance that it interrupts is dropped" if lost else ""

    def _utterance(self, cut: Cut) -> Utterance:
        stamp = 0
        if self._until and self._format is not None:
            heard = self._received * NANOSECONDS // self._format.sample_rate  # since the stream's start
            stamp = max(0, self._until - heard + cut.start * NANOSECONDS // VOICE_RATE)
        samples = np.clip(cut.samples, -MAX_AMPLITUDE, MAX_AMPLITUDE)  # resampling overshoots a little
        return Utterance(Sound(samples, VOICE_RATE), stamp, self._until, cut.reason)
