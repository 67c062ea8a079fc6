# SPDX-License-Identifier: Apache-2.0
"""Speaks answers while they are generated, and stops at once.

    planning threads           thread of the voice          thread of the sound
    begin, add, end, stop -->  sentences -- Voice --> sounds -- chunks in real time --> play
                                                              (a chunk without samples: silence now)

Callers never wait: they only put sentences into a bounded queue.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.voice.sentences import SentenceSplitter
from edgellm_ros.voice.voice import Voice

FIRST_LENGTH = 40  # characters: the first sound of a longer sentence would be late
MAX_WAITING = 50  # sentences
AHEAD_S = 5.0  # sound that is made before it is played
CHUNK_S = 0.1
LEAD_S = 0.1  # a chunk is played so long before its time: what delays of threads and messages may take
SILENCE: NDArray[np.int16] = np.zeros(0, np.int16)
SPOKEN, STOPPED, DROPPED = "sentences_spoken", "sentences_stopped", "sentences_dropped"


@dataclass(frozen=True)
class _Sound:
    """A piece of a sentence's sound."""

    samples: NDArray[np.int16]
    ends_sentence: bool


class Speaker:
    """One answer at a time; thread-safe.

    An answer is any object, its identity. `speaking` is true from the first chunk until its sound is over.
    """

    def __init__(
        self,
        voice: Voice,
        play: Callable[[NDArray[np.int16], float], None],
        count: Callable[[str, int], None],
        log: Callable[[str], None],
    ) -> None:
        """Start the threads.

        play(samples [N], time): called with chunks of at most CHUNK_S, and when their first sample is due by
        `time.monotonic`. No samples: silence from now on; what was played and not heard is dropped.
        count(name, number): sentences that were SPOKEN, STOPPED before their end, or DROPPED. log: told about
        sentences that the voice failed on.
        """
        self._voice, self._play, self._count, self._log = voice, play, count, log
        self._changed = threading.Condition()
        self._answer: object | None = None
        self._splitter = SentenceSplitter()
        self._turn = 0  # changes when an answer is stopped
        self._sentences: deque[str] = deque()
        self._sounds: deque[_Sound] = deque()
        self._ahead = 0  # samples in _sounds
        self._open = 0  # sentences that are not over
        self._closed = False
        self.speaking = False
        self._threads = [
            threading.Thread(target=target, name=name)
            for target, name in ((self._make_sounds, "edgellm-voice"), (self._play_sounds, "edgellm-speech"))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, answer: object) -> None:
        """Begin an answer; what is left of an earlier one is not spoken."""
        with self._changed:
            self._stop()
            self._answer = answer
            self._splitter = SentenceSplitter(first_length=FIRST_LENGTH)

    def add(self, answer: object, text: str) -> None:
        """Add text to an answer.

        Without effect once another answer has begun, or after a stop.
        """
        with self._changed:
            if answer is self._answer:
                self._queue(self._splitter.add(text))

    def end(self, answer: object) -> None:
        """End the text of an answer; what waits is spoken."""
        with self._changed:
            if answer is self._answer:
                self._queue(self._splitter.end())

    def stop(self, answer: object | None = None) -> bool:
        """Be silent at once; True if an answer was being spoken.

        answer: only if this one is being spoken; None = whichever it is.
        """
        with self._changed:
            if self._answer is None or (answer is not None and answer is not self._answer):
                return False
            was_speaking = bool(self._open)
            self._stop()
            return was_speaking

    def close(self) -> None:
        """Stop, and end the threads. Waits for the voice's present piece of sound."""
        with self._changed:
            self._stop()
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _stop(self) -> None:
        self._answer = None
        self._turn += 1
        self._sentences.clear()
        self._sounds.clear()
        self._ahead = 0
        if self._open:
            self._count(STOPPED, self._open)
        self._open = 0
        self._changed.notify_all()

    def _queue(self, sentences: list[str]) -> None:
        room = MAX_WAITING - len(self._sentences)
        if len(sentences) > room:
            self._count(DROPPED, len(sentences) - room)
        self._sentences += sentences[:room]
        self._open += len(sentences[:room])
        self._changed.notify_all()

    # Thread of the voice

    def _make_sounds(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_make_sound())
                if self._closed:
                    return
                sentence, turn = self._sentences.popleft(), self._turn
            try:
                for samples in self._voice.sounds(sentence):
                    if not self._add_sound(_Sound(samples, ends_sentence=False), turn):
                        break
            except Exception:  # one bad sentence must not end the thread
                self._log(traceback.format_exc())
                self._count(DROPPED, 1)
            self._add_sound(_Sound(SILENCE, ends_sentence=True), turn)

    def _may_make_sound(self) -> bool:
        return bool(self._sentences) and self._ahead < AHEAD_S * self._voice.sample_rate

    def _add_sound(self, sound: _Sound, turn: int) -> bool:
        """Queue a sound; False if its answer was stopped."""
        with self._changed:
            if turn != self._turn:
                return False
            self._sounds.append(sound)
            self._ahead += sound.samples.size
            self._changed.notify_all()
            return True

    # Thread of the sound

    def _play_sounds(self) -> None:
        until = 0.0  # when the sound that was played is over, by time.monotonic
        turn = 0
        while True:
            with self._changed:
                while True:
                    now = time.monotonic()
                    if self._closed or (self.speaking and (turn != self._turn or self._is_over(until, now))):
                        samples = SILENCE
                        break
                    due = until - LEAD_S if self.speaking else now
                    if self._sounds and due <= now:
                        samples = self._next_samples()
                        if not samples.size:  # the end of a sentence
                            continue
                        turn = self._turn
                        break
                    wait = (due if self._sounds else until) - now if self.speaking else None
                    self._changed.wait(wait)
                is_last, was_speaking = self._closed, self.speaking
                self.speaking = bool(samples.size)
            if until < now or not samples.size:
                until = now
            if samples.size or was_speaking:
                self._play(samples, until)
            if is_last:
                return
            until += samples.size / self._voice.sample_rate

    def _is_over(self, until: float, now: float) -> bool:
        return not self._sounds and now >= until

    def _next_samples(self) -> NDArray[np.int16]:
        """Take the next chunk off the queue; empty at the end of a sentence."""
        sound = self._sounds[0]
        if sound.ends_sentence:
            self._sounds.popleft()
            self._open -= 1
            self._count(SPOKEN, 1)
            return SILENCE
        size = round(CHUNK_S * self._voice.sample_rate)
        rest = sound.samples[size:]
        if rest.size:
            self._sounds[0] = _Sound(rest, ends_sentence=False)
        else:
            self._sounds.popleft()
        self._ahead -= min(size, sound.samples.size)
        self._changed.notify_all()  # the thread of the voice may go on
        return sound.samples[:size]
