# SPDX-License-Identifier: Apache-2.0
"""Make the package's bag: one arena episode as a robot would record it.

The analytic expert drives, so the bag depends on no checkpoint. The robot first stands still: a typed
question asks what it sees, and a spoken command tells it where to go. Then the command is typed again with
every frame on the way. `make expected` plays the bag into the node and stores the node's outputs.

Examples
--------
    python tools/make_arena_bag.py BAG

"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer

from edgellm_arena.driving import expert
from edgellm_arena.episodes.closed_loop import REPLAN_STEPS, Plan, drive
from edgellm_arena.episodes.episode import Outcome, World, make_episode
from edgellm_arena.speech.rooms import hear, sample_room
from edgellm_arena.speech.voice import sample_voice, speak
from edgellm_arena.world.unicycle import DT, HISTORY
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.replay.inputs import INPUT_TYPES, NODE
from edgellm_ros.replay.message_types import typestore

EPISODE = 1008
START_NS = 10 * 10**9
STEP_NS = round(DT * 1e9)
LATER_NS = 10**7  # from a frame to its command
QUESTION = "what do you see?"
JPEG_QUALITY = 95
BEFORE_S, AFTER_S = 0.4, 1.2  # noise of the room around the spoken command


class ArenaBag:
    """Writes camera, odometry, commands and microphone at the current time."""

    def __init__(self, path: Path) -> None:
        self._writer = Writer(path, version=9, storage_plugin=StoragePlugin.MCAP)
        self._types = {name: types[-1] for name, types in INPUT_TYPES.items()}
        self.now = START_NS

    def __enter__(self) -> ArenaBag:
        self._writer.open()
        self._connections = {
            name: self._writer.add_connection(f"{NODE}/{name}", kind, typestore=typestore())
            for name, kind in self._types.items()
        }
        return self

    def __exit__(self, *exception: Any) -> None:
        self._writer.__exit__(*exception)

    def step(self, world: World) -> None:
        """Advance the time by one step and write the robot's odometry."""
        self.now += STEP_NS
        state = world.state
        point = make("geometry_msgs/msg/Point", x=state.x, y=state.y, z=0.0)
        turned = make(
            "geometry_msgs/msg/Quaternion",
            x=0.0, y=0.0, z=math.sin(state.heading / 2), w=math.cos(state.heading / 2),
        )  # fmt: skip
        pose = make("geometry_msgs/msg/Pose", position=point, orientation=turned)
        twist = make("geometry_msgs/msg/Twist", linear=vector(state.speed), angular=vector(0.0))
        unknown = np.zeros(36)
        self._write(
            "odom",
            header=self._header("odom"),
            child_frame_id="base_link",
            pose=make("geometry_msgs/msg/PoseWithCovariance", pose=pose, covariance=unknown),
            twist=make("geometry_msgs/msg/TwistWithCovariance", twist=twist, covariance=unknown),
        )

    def look(self, frame: np.ndarray) -> None:
        """Write the camera's frame [H, W, 3] RGB."""
        parameters = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
        done, data = cv2.imencode(".jpg", cv2.cvtColor(frame, cv2.COLOR_RGB2BGR), parameters)
        assert done
        self._write("image", header=self._header("camera"), format="jpeg", data=data)

    def type(self, text: str) -> None:
        """Write a typed command, shortly after the current time."""
        self._write("command", later=LATER_NS, data=text)

    def record(self, samples: np.ndarray, rate: int) -> None:
        """Write the samples [N] float32 that the microphone recorded in the last step."""
        data = np.rint(samples * 32768).clip(-32768, 32767).astype("<i2").view(np.uint8)
        self._write(
            "audio",
            later=LATER_NS,  # a chunk is sent after its last sample
            header=self._header("microphone", self.now - STEP_NS),
            encoding="S16LE",
            sample_rate=rate,
            channels=1,
            data=data,
        )

    def _header(self, frame_id: str, stamp: int | None = None) -> Any:
        sec, nanosec = divmod(self.now if stamp is None else stamp, 10**9)
        time = make("builtin_interfaces/msg/Time", sec=sec, nanosec=nanosec)
        return make("std_msgs/msg/Header", stamp=time, frame_id=frame_id)

    def _write(self, name: str, later: int = 0, **fields: Any) -> None:
        kind = self._types[name]
        data = typestore().serialize_cdr(make(kind, **fields), kind)
        self._writer.write(self._connections[name], self.now + later, data)


def make(kind: str, **fields: Any) -> Any:
    """Make a message of the bag library."""
    return typestore().types[kind](**fields)


def vector(value: float) -> Any:
    """Make a vector along the first axis."""
    return make("geometry_msgs/msg/Vector3", x=value, y=0.0, z=0.0)


def spoken(text: str, seed: int) -> Sound:
    """Record a sentence with a speaker and a room of the test split."""
    rng = np.random.default_rng(seed)
    voice, room = sample_voice(rng, "test"), sample_room(rng, "test")
    return hear(speak(text, voice), room, rng, BEFORE_S, AFTER_S)


def make_arena_bag(path: Path) -> None:
    """Drive the episode and write the bag.

    FileExistsError if the bag exists.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists: expected a new folder")
    world = World(make_episode(EPISODE))
    command, target = world.episode.command.text, world.episode.target
    rng = np.random.default_rng(EPISODE)
    with ArenaBag(path) as bag:
        for _ in range(HISTORY):
            bag.step(world)
        bag.look(world.camera())
        bag.type(QUESTION)
        sound = spoken(command, EPISODE)
        size = round(sound.sample_rate * DT)
        for index in range(math.ceil(len(sound.samples) / size)):
            bag.step(world)
            if index % REPLAN_STEPS == 0:
                bag.look(world.camera())
            bag.record(sound.samples[index * size : (index + 1) * size], sound.sample_rate)
        bag.step(world)

        def think(frame: np.ndarray) -> Plan:
            bag.look(frame)
            bag.type(command)
            return Plan("", expert.plan(world.scene, world.state, target, rng))

        drive(world, think, lambda: bag.step(world))
    assert world.outcome is Outcome.SUCCESS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bag", type=Path, metavar="BAG", help="folder to write; must not exist")
    make_arena_bag(parser.parse_args().bag)
