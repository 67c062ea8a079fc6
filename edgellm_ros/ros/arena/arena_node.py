# SPDX-License-Identifier: Apache-2.0
"""The arena as a ROS node: a world with a robot in it that the edgellm node drives, episode after episode.

Time is simulated. The camera is triggered once per plan, and the clock stands still until the answer to that
frame is there; how long a plan takes on the robot is a parameter (`latency_steps`). So an episode follows
from its seed alone, on a fast computer and on a slow one.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

import numpy as np
import rclpy
from numpy.typing import NDArray
from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.executors import ExternalShutdownException

from edgellm_ros.arena.closed_loop import LATENCY_STEPS, REPLAN_STEPS, Plan, drive
from edgellm_ros.arena.episode import Episode, World, make_episode
from edgellm_ros.arena.person import SAY_AT_MOST, Person, person_of
from edgellm_ros.arena.picture import save_episode
from edgellm_ros.arena.scoring import names_target
from edgellm_ros.arena.unicycle import DT, HISTORY, wrap
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.arena.arena_link import ArenaLink, LinkError, Timing
from edgellm_ros.ros.arena.microphone import Microphone, save_wav

STEP_NS = round(DT * 1e9)
EPISODE_SEEDS = 1000  # episodes of one seed; those of the next seed are others
PAUSE_STEPS = (
    2 * HISTORY
)  # simulated rest between two episodes, longer than the history that a plan looks back on

# name: (default, description, lowest, highest); None where there is no range
PARAMETERS = {
    "seed": (1, "which episodes are played", 0, 10**12),
    "episodes": (1, "how many are played; 0 = until interrupted", 0, EPISODE_SEEDS),
    "spoken": (False, "the robot is spoken to, on edgellm/audio, instead of typed to", None, None),
    "question": ("", "asked at the start of each episode, before the command; empty = nothing", None, None),
    "out": (
        "",
        "folder for a picture of each episode, and for its command as a WAV file if spoken; empty = none",
        None,
        None,
    ),
    "events": (False, "tell what happens as JSON lines on standard output instead of the log", None, None),
    "replan_steps": (REPLAN_STEPS, "steps of 0.1 s from one camera frame to the next", 1, 20),
    "latency_steps": (LATENCY_STEPS, "steps of 0.1 s from a frame to the first action of its plan", 0, 20),
    "resend_after": (3.0, "seconds of silence after which a frame is sent again", 0.1, 600.0),
    "attempts": (10, "how often a frame is sent before the episode fails", 1, 1000),
    "active_timeout": (60.0, "seconds to wait for the edgellm node to be active", 0.1, 3600.0),
}


class ArenaNode(ArenaLink):
    """Plays episodes and tells what happens, as log lines or as JSON events."""

    def __init__(self) -> None:
        super().__init__()
        for name, (default, description, low, high) in PARAMETERS.items():
            descriptor = ParameterDescriptor(description=description, read_only=True)
            if isinstance(low, float):
                descriptor.floating_point_range = [FloatingPointRange(from_value=low, to_value=high)]
            elif low is not None:
                descriptor.integer_range = [IntegerRange(from_value=low, to_value=high, step=1)]
            self.declare_parameter(name, default, descriptor)
        self._stamp_ns = 10 * 10**9  # in ROS, time 0 means that there is no time
        self._heading = 0.0  # of the robot, a step ago
        self._microphone = Microphone(self) if self.value("spoken") else None

    def value(self, name: str):
        """A parameter's value."""
        return self.get_parameter(name).value

    def run(self) -> None:
        """Wait for the edgellm node, then play all episodes; LinkError if one cannot be finished."""
        self.wait_until_active(self.value("active_timeout"))
        for number in self._numbers():
            episode = make_episode(self.value("seed") * EPISODE_SEEDS + number)
            self.play(number, episode)

    def play(self, number: int, episode: Episode) -> None:
        """Play one episode, from the robot at rest to the outcome, and draw it if asked."""
        world = World(episode)
        self._heading = world.state.heading
        self.set_noise_seed(episode.seed)
        for _ in range(PAUSE_STEPS):
            self._advance(world)
        person = person_of(episode.seed) if self._microphone is not None else None
        question, command = self.value("question"), episode.command.text
        if question and self._tell(number, world, person, question)[0]:
            self._look(number, world, world.camera(), question if person is None else None)
            self.say("")
            self._advance(world)
        heard, recording = self._tell(number, world, person, command)
        timings: list[Timing] = []

        def think(frame: NDArray[np.uint8]) -> Plan:
            if not heard:  # nobody told it to do anything
                return Plan("", None)
            typed = command if person is None and not timings else None
            plan, timing = self._look(number, world, frame, typed)
            timings.append(timing)
            return plan

        driven = drive(
            world,
            think,
            lambda: self._advance(world),
            self.value("replan_steps"),
            self.value("latency_steps"),
        )
        self.say("")
        picture = None
        if self.value("out"):
            folder = Path(self.value("out"))
            folder.mkdir(parents=True, exist_ok=True)
            picture = str(folder / f"episode_{number:03d}.png")
            save_episode(picture, world, driven.plans)
            if recording is not None:
                save_wav(folder / f"episode_{number:03d}.wav", recording)
        self.report(
            "outcome",
            number=number,
            seed=episode.seed,
            family=episode.family,
            command=command,
            understood=names_target(driven.plans[0].text, episode),
            outcome=world.outcome.value,
            time=world.time,
            mean_speed=world.mean_speed(),
            least_clearance=world.least_clearance(),
            plans=len(timings),
            plan_seconds=[timing.plan_s for timing in timings],
            first_words_seconds=[timing.first_words_s for timing in timings],
            clipped_actions=driven.clipped,
            picture=picture,
        )

    def _advance(self, world: World) -> None:
        """The next step of simulated time."""
        self._stamp_ns += STEP_NS
        self.publish_state(self._stamp_ns, world.state, wrap(world.state.heading - self._heading) / DT)
        self._heading = world.state.heading

    def _look(
        self, number: int, world: World, frame: NDArray[np.uint8], command: str | None
    ) -> tuple[Plan, Timing]:
        """One frame, with a new command or the standing one, and the answer to it."""
        plan, timing = self.ask(
            self._stamp_ns, frame, self.value("resend_after"), self.value("attempts"), command
        )
        drives = plan.actions is not None
        self.report("plan", number=number, time=world.time, text=plan.text, drives=drives, **asdict(timing))
        return plan, timing

    def _tell(
        self, number: int, world: World, person: Person | None, command: str
    ) -> tuple[bool, Sound | None]:
        """A person says the command, again if the robot did not hear it: whether it did, and the recording.
        Without a person nothing is said: it will be typed.
        """
        episode = world.episode

        def advance() -> int:
            before = self._stamp_ns
            self._advance(world)
            return before

        for time in range(SAY_AT_MOST):
            self.report(
                "command",
                number=number,
                seed=episode.seed,
                family=episode.family,
                command=command,
                person=None if person is None else str(person),
            )
            if person is None:
                return True, None
            recording = person.say(command, time)
            if self._microphone.record(recording, advance):
                return True, recording
        return False, recording

    def report(self, event: str, **fields) -> None:
        """Tell what happens: {"event": ..., fields} as a line of JSON, or the same in words in the log."""
        if self.value("events"):
            print(json.dumps({"event": event, **fields}), flush=True)
        elif event == "command":
            how = f"{fields['person']} says" if fields["person"] else "a person types"
            self.get_logger().info(f'episode {fields["number"]}: {how} "{fields["command"]}"')
        elif event == "plan":
            self.get_logger().info(
                f'{fields["time"]:4.1f} s: "{fields["text"]}" ({fields["plan_s"] * 1e3:.0f} ms)'
            )
        else:
            self.get_logger().info(
                f"episode {fields['number']}: {fields['outcome']} after {fields['time']:.1f} s"
            )

    def _numbers(self) -> Iterator[int]:
        episodes = self.value("episodes")
        return iter(range(episodes)) if episodes else (number % EPISODE_SEEDS for number in count())


def main(args: Sequence[str] | None = None) -> int:
    """Run the node and return the exit code.

    0: all episodes were played, or the node was interrupted; 1: an episode could not be finished.
    """
    node = None
    try:
        rclpy.init(args=args)
        node = ArenaNode()
        node.run()
        return 0
    except (KeyboardInterrupt, ExternalShutdownException):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a supervisor may repeat the signal of the terminal
        return 0
    except LinkError as error:
        print(f"arena: {error}", file=sys.stderr)
        return 1
    finally:
        if node is not None:
            node.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    sys.exit(main())
