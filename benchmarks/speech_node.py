# SPDX-License-Identifier: Apache-2.0
"""Delay from the end of a spoken command to the first word of the node's answer."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from edgellm_ros.msg import AudioChunk, Generation, Transcript
from nav_msgs.msg import Odometry
from rclpy.qos import QoSProfile
from sensor_msgs.msg import Image
from std_msgs.msg import String

from benchmarks import common
from benchmarks.node_process import NodeProcess
from edgellm_arena.episodes.episode import World, make_episode
from edgellm_arena.ros.arena_link import to_image
from edgellm_arena.speech.person import person_of
from edgellm_arena.speech.rooms import MICROPHONE_RATE, hear
from edgellm_arena.speech.voice import speak
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT, export_if_needed
from edgellm_ros.engine.onnxruntime.session import available_cores
from edgellm_ros.hearing.rule import WORD
from edgellm_ros.hearing.transcriber import speech_engine_config
from edgellm_ros.multimodal.audio.pcm import to_int16
from edgellm_ros.ros.messaging import NANOSECONDS, to_time

WARM_UP = 2  # commands
CHUNK_S, BEFORE_S, AFTER_S = 0.04, 1.0, 8.0  # of a chunk; of the room's noise before and after the speech
FRAME_EVERY = 3  # chunks
QUIET = 0.02  # of the peak: softer samples at the end of the speech are silence
CONNECT_S, ANSWER_S = 30.0, 30.0
OBEY_ALL = {"hearing.min_confidence": -100.0, "hearing.max_letters_per_second": 1000.0}
PARTS = ("utterance", "transcript", "word", "total")

UNHEARD, EARLY, NOT_OBEYED, NO_WORD = "unheard", "early", "not_obeyed", "no_word"


@dataclass(frozen=True)
class SpokenCommand:
    """A command as the robot's microphone records it, and the camera frame beside it."""

    samples: np.ndarray  # [N] int16 at 16 kHz
    end_s: float  # of the speech, in the recording
    frame: np.ndarray  # [H, W, 3] RGB
    text: str


def spoken_command(seed: int) -> SpokenCommand:
    """Make the command of an episode, spoken by a person of the split "test"."""
    world, person = World(make_episode(seed)), person_of(seed)
    spoken = speak(world.episode.command.text, person.voice)
    level = np.abs(spoken.samples)
    last = int(np.flatnonzero(level > QUIET * level.max())[-1])
    heard = hear(spoken, person.room, np.random.default_rng(seed), BEFORE_S, AFTER_S)
    end_s = BEFORE_S + last / spoken.sample_rate
    return SpokenCommand(to_int16(heard.samples), end_s, world.camera(), world.episode.command.text)


class Robot:
    """The robot's microphone, camera and odometry; the times of the node's outputs.

    Times are `time.monotonic()` when an output arrives in this process.
    """

    def __init__(self, process: NodeProcess) -> None:
        self._process = process
        node, reliable = process.node, QoSProfile(depth=100)
        self._odometry = node.create_publisher(Odometry, "edgellm/odom", reliable)
        self._image = node.create_publisher(Image, "edgellm/image", reliable)
        self._audio = node.create_publisher(AudioChunk, "edgellm/audio", reliable)
        node.create_subscription(AudioChunk, "edgellm/utterance", self._on_utterance, reliable)
        node.create_subscription(Transcript, "edgellm/transcript", self._on_transcript, reliable)
        node.create_subscription(String, "edgellm/text_stream", self._on_text, reliable)
        node.create_subscription(Generation, "edgellm/generation", self._on_generation, reliable)
        self._clear()
        needed = (self._odometry, self._image, self._audio)
        if not process.spin_until(lambda: all(p.get_subscription_count() for p in needed), CONNECT_S):
            raise RuntimeError(
                f"the node has no subscriptions to the robot's sensors after {CONNECT_S:.0f} s"
            )

    def hear(self, command: SpokenCommand) -> dict[str, float] | str:
        """Play a recording in real time until the first word of the answer.

        Return seconds of each part of `PARTS`, or why there are none: `UNHEARD`, `EARLY` (the utterance ended
        before the speech), `NOT_OBEYED` or `NO_WORD`.
        """
        self._clear()
        size = round(CHUNK_S * MICROPHONE_RATE)
        wall = self._process.node.get_clock().now().nanoseconds
        start = time.monotonic()
        for index in range(len(command.samples) // size):
            self._wait_until(start + (index + 1) * CHUNK_S)  # a chunk is sent with its last sample
            if self._word or self._unobeyed:
                break
            stamp = wall + round(index * CHUNK_S * NANOSECONDS)
            if index % FRAME_EVERY == 0:
                self._image.publish(to_image(stamp, command.frame))
                odometry = Odometry()
                odometry.header.stamp = to_time(stamp)
                odometry.pose.pose.orientation.w = 1.0
                self._odometry.publish(odometry)
            self._send(stamp, command.samples[index * size : (index + 1) * size])
        self._send(stamp, command.samples[:0])  # ends the stream
        if self._transcript and not self._unobeyed:
            self._process.spin_until(lambda: self._answered, ANSWER_S)  # the next command interrupts no plan
        return delays(start + command.end_s, self._utterance, self._transcript, self._word, self._unobeyed)

    def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            self._process.spin_until(lambda: self._word or self._unobeyed, left)
            if self._word or self._unobeyed:
                return

    def _send(self, stamp: int, samples: np.ndarray) -> None:
        chunk = AudioChunk(encoding=AudioChunk.S16LE, sample_rate=MICROPHONE_RATE, data=samples.tobytes())
        chunk.header.stamp = to_time(stamp)
        self._audio.publish(chunk)

    def _clear(self) -> None:
        self._utterance = self._transcript = self._word = 0.0
        self._unobeyed = self._answered = False
        self.heard = ""

    def _on_utterance(self, message: AudioChunk) -> None:
        self._utterance = self._utterance or time.monotonic()

    def _on_transcript(self, message: Transcript) -> None:
        if message.final and not self._transcript:
            self._transcript, self._unobeyed = time.monotonic(), not message.command
            self.heard = message.text

    def _on_text(self, message: String) -> None:
        if message.data.strip() and self._transcript and not self._word:
            self._word = time.monotonic()

    def _on_generation(self, message: Generation) -> None:
        self._answered = True


def delays(
    end: float, utterance: float, transcript: float, word: float, unobeyed: bool
) -> dict[str, float] | str:
    """Return seconds of each part, or why there are none.

    end: time of the end of the speech; utterance, transcript, word: times of the node's outputs, 0 = none.
    """
    if not (utterance and transcript):
        return UNHEARD
    if utterance < end:
        return EARLY
    if not word:
        return NOT_OBEYED if unobeyed else NO_WORD
    parts = [after - before for before, after in pairwise((end, utterance, transcript, word))]
    return dict(zip(PARTS, [*parts, word - end], strict=True))


def measure_node(args: argparse.Namespace) -> dict[str, Any]:
    """Speak commands to the node; print the result as the last line, return it.

    args: of `benchmarks.speech`.
    """
    engine, speech_engine = args.engine or Path("engines/arena"), args.speech_engine
    speech_engine_config(speech_engine)
    if args.engine is None:
        export_if_needed(ARENA_CHECKPOINT, engine)
    changes = OBEY_ALL if args.obey_all else {}
    parameters = {"speech_engine_dir": str(speech_engine.resolve()), "device": args.device, **changes}
    found: list[dict[str, float]] = []
    failed: Counter[str] = Counter()
    right = 0
    with NodeProcess(engine, **parameters) as process:
        robot = Robot(process)
        for number in range(-WARM_UP, args.runs):
            command = spoken_command(common.SEED + number + WARM_UP)
            result = robot.hear(command)
            print(f"{number}: {command.text!r}, heard {robot.heard!r}: {_line(result)}", file=sys.stderr)
            if number < 0:
                continue
            right += words(robot.heard) == words(command.text)
            if isinstance(result, str):
                failed[result] += 1
            else:
                found.append(result)
    spreads = {f"{part}_ms": common.spread([1e3 * each[part] for each in found]) for part in PARTS if found}
    return common.finish(
        "speech_node",
        changes=changes,
        engine=str(engine),
        speech_engine=str(speech_engine),
        device=args.device,
        cores=available_cores(),
        commands=args.runs,
        answered=len(found),
        transcripts_right=right,
        **{name: failed[name] for name in (UNHEARD, EARLY, NOT_OBEYED, NO_WORD)},
        **spreads,
        load_average=os.getloadavg()[0],
    )


def words(text: str) -> list[str]:
    """Return the words of a text without capitals and punctuation."""
    return WORD.findall(text.lower())


def _line(result: dict[str, float] | str) -> str:
    if isinstance(result, str):
        return result.replace("_", " ")
    return ", ".join(f"{part} {1e3 * seconds:.0f} ms" for part, seconds in result.items())
