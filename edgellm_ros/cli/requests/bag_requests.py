# SPDX-License-Identifier: Apache-2.0
"""Requests of a bag: each new command with camera frames.

The frames are the one before the command and all up to the next command. The topics are those of
`edgellm replay`. A command is a text on ~/command, or an utterance in the sound on ~/audio. Nothing here
needs ROS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_ros.diffusion.config import TrajectoryHistoryConfig
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

if TYPE_CHECKING:
    from edgellm_ros.multimodal.audio.sound_stream import Utterance
    from edgellm_ros.replay.inputs import InputMessage

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, eq=False)
class Pair:
    """A command, and the camera frame to plan on."""

    text: str
    sound: Sound | None
    frame: int | None  # number of the message among the bag's inputs; None = the model needs no frame
    stamp: int  # of the frame, else of the command, in nanoseconds


def read_bag(
    path: str | Path, config: EngineConfig, most: int, sampling: SamplingParams
) -> dict[str, LLMGenerationRequest]:
    """Read at most `most` requests, spread over the bag, by their places in it.

    BagError, which names the bag, if the bag is damaged or lacks commands, or frames that the model needs.
    The bag is read twice, so that only the chosen frames are in memory.
    """
    from edgellm_ros.replay.bag import Bag, BagError
    from edgellm_ros.replay.inputs import find_inputs

    sees, hears = config.vision is not None, config.audio is not None
    with Bag(path) as bag:
        inputs = find_inputs(bag, {}, needs_image=sees, needs_odometry=False, hears=hears, advice="")
        try:
            reader = _BagReader(sees, hears)
            for number, message in enumerate(inputs):
                reader.add(number, message)
            pairs = reader.finish()
            chosen = [pairs[index] for index in spread(len(pairs), most)]
            wanted = {pair.frame for pair in chosen}
            frames = {number: _pixels(each) for number, each in enumerate(inputs) if number in wanted}
        except BagError:
            raise
        except ValueError as error:
            raise BagError(f"{path}: {error}") from None
    if not chosen:
        raise BagError(f"{path}: no command or utterance{' with a camera frame' if sees else ''}")
    requests = {}
    for number, pair in enumerate(chosen):
        state = _state(reader.poses, pair.stamp, config.action.trajectory_history) if config.action else {}
        requests[f"{path}: request {number} at {pair.stamp} ns"] = LLMGenerationRequest(
            pair.text,
            images=() if pair.frame is None else (frames[pair.frame],),
            audio=() if pair.sound is None else (pair.sound,),
            sampling=sampling,
            **state,
        )
    return requests


def spread(count: int, most: int) -> list[int]:
    """Choose at most this many of `count` indices, evenly spread."""
    return [index * count // most for index in range(most)] if count > most else list(range(count))


class _BagReader:
    """Pairs the commands of a bag with its frames, whose pixels stay undecoded."""

    def __init__(self, sees: bool, hears: bool) -> None:
        from edgellm_ros.multimodal.audio.sound_stream import SoundStream
        from edgellm_ros.multimodal.audio.utterance import UtteranceSettings
        from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity

        self.poses: list[tuple[float, ...]] = []  # stamp in seconds, values of `read_pose`
        self._sees = sees
        self._stream = SoundStream(VoiceActivity(), UtteranceSettings()) if hears else None
        self._command: tuple[str, Sound | None] = ("", None)
        self._frame: tuple[int, int] | None = None  # number of the newest frame, its stamp
        self._pairs: list[Pair] = []
        self._stamp = 0  # of the newest message

    def add(self, number: int, message: InputMessage) -> None:
        """Add a message; ValueError for one that cannot be used."""
        from edgellm_ros.ros.node.sensors.poses import read_pose

        stamp = self._stamp = message.stamp
        if message.name == "odom":
            self.poses.append((stamp / NANOSECONDS, *read_pose(_decode(message))))
        elif message.name == "command":
            self._take(_decode(message).data, None, stamp)
        elif message.name == "audio" and self._stream is not None:
            chunk = _decode(message)
            sound = chunk.encoding, chunk.sample_rate, chunk.channels, chunk.data.tobytes()
            self._hear(self._stream.add(*sound, stamp), stamp)
        elif message.name == "image" and self._sees:
            if self._stream is not None:
                self._hear(self._stream.time_passed(stamp), stamp)
            self._frame = number, stamp
            self._pair(stamp)

    def finish(self) -> list[Pair]:
        """End the sound; return all pairs."""
        if self._stream is not None:
            self._hear(self._stream.add("F32LE", 16000, 1, b"", 0), self._stamp)
        return self._pairs

    def _hear(self, utterances: Sequence[Utterance], stamp: int) -> None:
        for utterance in utterances:
            self._take("", utterance.sound, stamp)

    def _take(self, text: str, sound: Sound | None, stamp: int) -> None:
        """Take a command: an empty one ends the last one, a repeated one changes nothing."""
        if (text, sound) == self._command:
            return
        self._command = text, sound
        self._pair(stamp)

    def _pair(self, stamp: int) -> None:
        text, sound = self._command
        if (text or sound is not None) and (self._frame is not None or not self._sees):
            frame, stamp = self._frame or (None, stamp)
            self._pairs.append(Pair(text, sound, frame, stamp))


def _state(
    poses: Sequence[tuple[float, ...]], stamp: int, history: TrajectoryHistoryConfig
) -> dict[str, Any]:
    """Return the fields of a request with past poses and speed; none without odometry."""
    from edgellm_ros.ros.node.sensors.past_motion import past_motion

    if not poses:
        return {}
    past = past_motion(np.array(poses), stamp / NANOSECONDS, history.num_points, history.dt)
    return {"history": past.history, "speed": past.speed}


def _decode(message: InputMessage) -> Any:
    from edgellm_ros.replay.message_types import typestore

    return typestore().deserialize_cdr(message.data, message.type)


def _pixels(message: InputMessage) -> np.ndarray:
    """Decode a camera frame, RGB uint8 [H, W, 3]."""
    from edgellm_ros.replay.inputs import COMPRESSED
    from edgellm_ros.ros.node.sensors.compressed_images import decode_file
    from edgellm_ros.ros.node.sensors.raw_images import decode_raw

    decoded = _decode(message)
    return decode_file(decoded.data, decoded.format) if message.type == COMPRESSED else decode_raw(decoded)
