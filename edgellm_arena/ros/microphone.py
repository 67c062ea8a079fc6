# SPDX-License-Identifier: Apache-2.0
"""The robot's microphone in the arena: publishes recordings on edgellm/audio.

Stamps are in simulated time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from edgellm_ros.msg import AudioChunk
from edgellm_ros.srv import GetMetrics
from rclpy.qos import QoSProfile

from edgellm_arena.ros.arena_link import ArenaLink
from edgellm_arena.world.unicycle import DT
from edgellm_ros.multimodal.audio.pcm import to_int16
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.messaging import to_time
from edgellm_ros.ros.world_link import LinkError
from edgellm_ros.voice.wav_file import WavFile

AHEAD = 5  # pieces of DT s that are sent before the node has received them: 0.5 s, less than max_input_age
RECEIVED_S, POLL_S = 30.0, 0.005
RELIABLE = QoSProfile(depth=50)
OBEYED = "transcripts_obeyed"
# What becomes of an utterance in a speech engine.
TRANSCRIBED = (OBEYED, "transcripts_refused", "transcripts_failed", "utterances_skipped")


class Microphone:
    """Records for the edgellm node.

    The clock advances by DT for each piece, and waits for the node to receive the pieces: so the node hears
    the same on every computer.
    """

    def __init__(self, link: ArenaLink, transcribed: bool = False) -> None:
        """Publish through `link`; transcribed: the node has a speech engine."""
        self._link, self._transcribed = link, transcribed
        self._publisher = link.create_publisher(AudioChunk, "edgellm/audio", RELIABLE)
        self._metrics = link.create_client(GetMetrics, "edgellm/get_metrics")
        link.needed.append(self._publisher)

    def record(self, sound: Sound, advance: Callable[[], int]) -> int:
        """Send a sound in pieces; return the number of utterances that the node heard.

        With a speech engine, those whose transcripts it obeys. `advance()` advances simulated time by DT and
        returns the stamp (ns) before. LinkError if the node does not receive the pieces, or does not
        transcribe them.
        """
        before = self._counts()
        data = to_int16(sound.samples)
        size = round(DT * sound.sample_rate)
        sent = 0
        for start in range(0, len(data), size):
            stamp = advance()
            self._send(sound.sample_rate, stamp, data[start : start + size].tobytes())
            sent += 1
            if sent % AHEAD == 0:
                self._wait_until(["audio_received"], before["audio_received"] + sent)
        self._send(sound.sample_rate, 0, b"")  # switched off
        after = self._wait_until(["audio_received"], before["audio_received"] + sent + 1)
        if not self._transcribed:
            return round(after["utterances"] - before["utterances"])
        ended = sum(before[name] for name in TRANSCRIBED)
        after = self._wait_until(TRANSCRIBED, ended + after["utterances"] - before["utterances"])
        return round(after[OBEYED] - before[OBEYED])

    def _send(self, sample_rate: int, stamp: int, data: bytes) -> None:
        message = AudioChunk(encoding=AudioChunk.S16LE, sample_rate=sample_rate, channels=1, data=data)
        message.header.stamp, message.header.frame_id = to_time(stamp), "microphone"
        self._publisher.publish(message)

    def _wait_until(self, names: Sequence[str], count: float) -> dict[str, float]:
        """Wait until counters of the node have a sum of `count`.

        Returns all counters.
        """
        deadline = time.monotonic() + RECEIVED_S
        while True:
            counts = self._counts()
            found = sum(counts[name] for name in names)
            if found >= count:
                return counts
            if time.monotonic() > deadline:
                raise LinkError(
                    f"{self._link.node_name}: expected {count:.0f} of {' + '.join(names)} within "
                    f"{RECEIVED_S:.0f} s, got {found:.0f}"
                )
            self._link.spin_until(lambda: False, POLL_S)

    def _counts(self) -> dict[str, float]:
        response = self._link.call(self._metrics, GetMetrics.Request())
        counts = dict(zip(response.names, response.values, strict=True))
        return {name: counts.get(name, 0.0) for name in ("audio_received", "utterances", *TRANSCRIBED)}


def save_wav(file: str | Path, sound: Sound) -> None:
    """Write a sound as a WAV file of 16 bits."""
    with closing(WavFile(Path(file), sound.sample_rate)) as wav:
        wav.write(to_int16(sound.samples))
