# SPDX-License-Identifier: Apache-2.0
"""The arena as a ROS node: a world with a robot that the edgellm node drives.

Time is simulated. The camera is triggered once per plan, and the clock stands still until the answer to
that frame has arrived; the latency of a plan is a parameter (`latency_steps`). So an episode depends on its
seed only, not on the speed of the computer.

With `execution` "async" or "wait", the edgellm node sees the latency too: a frame of time t is published when
the clock is at t + `inference_delay`, and the clock stands still until its answer has arrived.

With the parameter `follower`, the node edgellm_follower drives: each step waits for its command, and a plan
is driven from the step after its frame on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor

from edgellm_arena.driving.smoothness import named_jumps
from edgellm_arena.episodes.closed_loop import LATENCY_STEPS, REPLAN_STEPS, Drive, Plan, drive
from edgellm_arena.episodes.delayed_loop import Execution, delay_in_steps, drive_delayed
from edgellm_arena.episodes.episode import EPISODE_FAMILIES, EPISODE_SEEDS, Episode, World, make_episode
from edgellm_arena.episodes.scoring import names_target
from edgellm_arena.ros.arena_link import PARTS, ArenaLink, Timing
from edgellm_arena.ros.episode_files import save_files
from edgellm_arena.ros.follower_link import FollowerLink
from edgellm_arena.ros.microphone import Microphone
from edgellm_arena.speech.person import SAY_AT_MOST, Person, person_of
from edgellm_arena.world.unicycle import DT, HISTORY, HORIZON, State, wrap
from edgellm_ros.echo import quoted
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.world_link import LinkError, run_world
from edgellm_ros.voice.voice import Voice, open_voice

STEP_NS = round(DT * 1e9)
PAUSE_STEPS = 2 * HISTORY  # simulated rest between two episodes, longer than the history of a plan
AUTO, LOCK_STEP = "auto", "lock_step"
EXECUTIONS = (AUTO, LOCK_STEP, *(execution.value for execution in Execution))

# name: (default, description, lowest, highest); None where there is no range
PARAMETERS = {
    "seed": (1, "Seed of the episodes; equal seeds give equal episodes.", 0, 10**12),
    "episodes": (1, "Number of episodes; 0 = until interrupted.", 0, EPISODE_SEEDS),
    "first_episode": (0, "Number of the first episode.", 0, EPISODE_SEEDS - 1),
    "family": (
        "",
        f"Family of all episodes: {', '.join(EPISODE_FAMILIES)}; empty = as the seed decides.",
        None,
        None,
    ),
    "spoken": (
        False,
        "Give commands as speech on edgellm/audio instead of text on edgellm/command.",
        None,
        None,
    ),
    "transcribed": (
        False,
        "Whether the edgellm node has a speech engine: what is said counts as heard when the node obeys its "
        "transcript.",
        None,
        None,
    ),
    "follower": (
        False,
        "Drive by the stamped commands of edgellm_follower (rate 10, stamped) instead of the action chunks.",
        None,
        None,
    ),
    "question": ("", "Question at the start of each episode, before the command; empty = none.", None, None),
    "out": (
        "",
        "Folder for a picture of each episode and its spoken command as a WAV file; empty = none.",
        None,
        None,
    ),
    "voice": (
        "",
        "Voice of the robot, as the node's parameter voice: a further WAV file has what one hears in the "
        "episode, the person, the motor and the robot's answer; empty = none.",
        None,
        None,
    ),
    "events": (False, "Report events as JSON lines on standard output instead of the log.", None, None),
    "replan_steps": (REPLAN_STEPS, "Time between camera frames, in steps of 0.1 s.", 1, 20),
    "latency_steps": (
        LATENCY_STEPS,
        "Time from a frame to the first action of its plan, in steps of 0.1 s; for execution lock_step "
        "without follower.",
        0,
        20,
    ),
    "execution": (
        AUTO,
        "What the robot does while a plan is computed. lock_step = the edgellm node sees no latency, and the "
        "robot follows the last plan for latency_steps. async and wait = the node sees a latency of "
        "inference_delay, and the robot follows the last plan or stands. auto = async with an "
        "inference_delay, else lock_step.",
        None,
        None,
    ),
    "inference_delay": (
        0.0,
        "Simulated time from a frame to the publication of its plan, in seconds, rounded up to steps of "
        "0.1 s; for execution async and wait.",
        0.0,
        60.0,
    ),
    "resend_after": (
        3.0,
        "Time without any message after which a frame is sent again, in seconds.",
        0.1,
        600.0,
    ),
    "attempts": (10, "Maximum number of times that a frame is sent before the episode fails.", 1, 1000),
    "active_timeout": (60.0, "Maximum time to wait for an active edgellm node, in seconds.", 0.1, 3600.0),
}


class ArenaNode(ArenaLink):
    """Plays episodes and reports events as log lines or as JSON."""

    def __init__(self) -> None:
        super().__init__()
        for name, (default, description, low, high) in PARAMETERS.items():
            descriptor = ParameterDescriptor(description=description, read_only=True)
            if isinstance(low, float):
                descriptor.floating_point_range = [FloatingPointRange(from_value=low, to_value=high)]
            elif low is not None:
                descriptor.integer_range = [IntegerRange(from_value=low, to_value=high, step=1)]
            self.declare_parameter(name, default, descriptor)
        self._numbers = self._read_numbers()
        self._family = self._read_family()
        self._stamp_ns = 10 * 10**9  # in ROS, time 0 means that there is no time
        self._heading = 0.0  # of the robot, a step ago
        self._microphone = Microphone(self, self.value("transcribed")) if self.value("spoken") else None
        self._follower = FollowerLink(self) if self.value("follower") else None
        self._execution = self._read_execution()  # None = lock_step
        self._voice = self._open_voice()
        self._delay_steps = delay_in_steps(self.value("inference_delay"))

    def value(self, name: str):
        """Return the value of a parameter."""
        return self.get_parameter(name).value

    def run(self) -> None:
        """Wait for the edgellm node, then play all episodes.

        Raises LinkError if one cannot be finished.
        """
        self.wait_until_active(self.value("active_timeout"))
        if self._follower is not None:
            self._follower.wait_until_active(self.value("active_timeout"))
        for number in self._numbers:
            episode = make_episode(self.value("seed") * EPISODE_SEEDS + number, self._family)
            self.play(number, episode)

    def play(self, number: int, episode: Episode) -> None:
        """Play one episode, from the robot at rest to the outcome.

        Saves its picture if `out` is set.
        """
        world = World(episode)
        self._heading = world.state.heading
        self.set_noise_seed(episode.seed)
        if self._follower is not None:
            self._follower.stop()  # the last episode's chunk is not driven in this one
        if self._execution is not None:
            self._stamp_ns += HORIZON * STEP_NS  # the last episode's chunk has no rows left
        for _ in range(PAUSE_STEPS):
            self._advance(world)
        person = person_of(episode.seed) if self._microphone is not None else None
        question, command = self.value("question"), episode.command.text
        if question and self._tell(number, world, person, question)[0]:
            frame = world.camera()
            for _ in range(self._delay_steps):
                self._advance(world)
            self._look(number, world, frame, question if person is None else None, self._delay_steps)
            self.say("")
            self._advance(world)
        heard, recording = self._tell(number, world, person, command)
        timings: list[Timing] = []

        def think(frame: NDArray[np.uint8], age: int = 0) -> Plan:
            if not heard:  # the robot has no command
                return Plan("", None)
            typed = command if person is None and not timings else None
            plan, timing = self._look(number, world, frame, typed, age)
            timings.append(timing)
            return plan

        if self._follower is not None:
            self._follower.resume()
        driven = self._drive(world, think)
        self.say("")
        picture = None
        if self.value("out"):
            folder = Path(self.value("out"))
            picture = save_files(folder, number, world, driven.plans, recording, self._voice)
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
            part_seconds={part: [getattr(timing, f"{part}_s") for timing in timings] for part in PARTS},
            clipped_actions=driven.clipped,
            picture=picture,
            **(
                {}
                if self._execution is None  # the drivers of the steps are not recorded
                else named_jumps(world.track, driven.drivers, driven.continuations)
            ),
        )

    def _drive(self, world: World, think: Callable[..., Plan]) -> Drive:
        def on_step() -> None:
            self._advance(world)

        replan_steps = self.value("replan_steps")
        if self._execution is not None:
            return drive_delayed(world, think, on_step, self._delay_steps, self._execution, replan_steps)
        followed = self._followed if self._follower is not None else None
        return drive(world, think, on_step, replan_steps, self.value("latency_steps"), followed)

    def _read_execution(self) -> Execution | None:
        """Return the execution; None for lock_step.

        Raises LinkError for parameters that do not go together.
        """
        execution, delay = self.value("execution"), self.value("inference_delay")
        if execution not in EXECUTIONS:
            raise LinkError(f"execution must be one of {', '.join(EXECUTIONS)}, got {quoted(execution)}")
        if execution == AUTO:
            execution = Execution.ASYNC.value if delay else LOCK_STEP
        if execution == LOCK_STEP:
            if delay:
                raise LinkError("inference_delay needs execution async or wait, not lock_step")
            return None
        if self._follower is not None:
            raise LinkError(f"execution {execution} is not for a robot that the follower drives")
        return Execution(execution)

    def _open_voice(self) -> Voice | None:
        """Open the robot's voice; LinkError for one that cannot be used."""
        try:
            return open_voice(self.value("voice"), noise_scale=0.0) if self.value("voice") else None
        except (OSError, ValueError, ImportError) as error:
            raise LinkError(f"voice: {error}") from None

    def _read_family(self) -> str | None:
        """Return the family of all episodes; LinkError for an unknown one."""
        family = self.value("family")
        if family not in ("", *EPISODE_FAMILIES):
            raise LinkError(f"family must be one of {', '.join(EPISODE_FAMILIES)}, got {quoted(family)}")
        return family or None

    def _advance(self, world: World) -> None:
        """Advance simulated time by one step."""
        self._stamp_ns += STEP_NS
        self.publish_state(self._stamp_ns, world.state, wrap(world.state.heading - self._heading) / DT)
        self._heading = world.state.heading

    def _followed(self, state: State) -> tuple[float, float]:
        """Return the follower's action for the next step."""
        return self._follower.action(self._stamp_ns, state)

    def _look(
        self, number: int, world: World, frame: NDArray[np.uint8], command: str | None, age: int
    ) -> tuple[Plan, Timing]:
        """Send a frame of `age` steps ago, and return the answer.

        The frame goes with a new command, or with the last one.
        """
        stamp, time = self._stamp_ns - age * STEP_NS, max(world.time - age * DT, 0.0)
        plan, timing = self.ask(stamp, frame, self.value("resend_after"), self.value("attempts"), command)
        drives = plan.actions is not None
        self.report("plan", number=number, time=time, text=plan.text, drives=drives, **asdict(timing))
        return plan, timing

    def _tell(
        self, number: int, world: World, person: Person | None, command: str
    ) -> tuple[bool, Sound | None]:
        """Have a person say the command, repeatedly until the robot hears it.

        Returns whether the robot heard the command, and the recording. Without a person nothing is said: the
        command is sent as text.
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
        """Report an event as a line of JSON, {"event": ..., fields}, or in the log."""
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
                f"episode {fields['number']} (episode seed {fields['seed']}): {fields['outcome']} "
                f"after {fields['time']:.1f} s"
            )

    def _read_numbers(self) -> Iterator[int]:
        """Return the episodes' numbers; LinkError for some that the seed does not have."""
        first, episodes = self.value("first_episode"), self.value("episodes")
        if not episodes:
            return (number % EPISODE_SEEDS for number in count(first))
        if first + episodes > EPISODE_SEEDS:
            raise LinkError(
                f"first_episode {first} and episodes {episodes}: expected a sum of at most {EPISODE_SEEDS}, "
                "the number of episodes of one seed"
            )
        return iter(range(first, first + episodes))


def run(args: Sequence[str] | None = None) -> int:
    """Run the node and return the exit code.

    0: all episodes were played, or the node was interrupted; 1: an episode could not be finished.
    """
    return run_world("arena", ArenaNode, args)
