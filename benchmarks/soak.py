# SPDX-License-Identifier: Apache-2.0
"""Endurance of the node over a day of spoken commands.

Measures
--------
Commands that are not heard, utterances with no answer or two, and answers that change although sound, frame
and seed are equal. Also the growth of memory per plan over the second half of the run (the first half fills
pools and caches), estimated robustly (benchmarks/growth.py): memory allocated from malloc and in use (with
Python objects, after a garbage collection), memory that malloc keeps free, and other resident memory.
Targets: at most one command in 20 is not heard, every utterance has one answer, equal inputs give equal
tokens, each of the three grows by less than 250 bytes per plan, no additional thread at the end, and exit
code 0.

Conditions
----------
The node in its own process, 8 hours of simulated time as fast as possible. The microphone is always on. Every
14.4 s a speaker of the split "test" says the command of one of 20 episodes, in a noisy room, until 2,000
plans are made. The node also gets camera frames and odometry.

Examples
--------
    python -m benchmarks.soak
    python -m benchmarks.soak --plans 400 --hours 1 --minutes 15

Last JSON line: `passed`, counts (`commands`, `unheard`, `utterances`, `plans`, `lost`, `doubled`, `changed`),
`*_mb` at start, middle and end and `*_bytes_per_plan` of each kind of memory, threads, and `exit_code`.

"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
from edgellm_ros.msg import AudioChunk, Generation
from edgellm_ros.srv import GetMetrics
from nav_msgs.msg import Odometry
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image

from benchmarks import common
from benchmarks.growth import growth_rate
from benchmarks.memory import Memory
from benchmarks.node_process import NodeProcess
from edgellm_arena.episodes.episode import World, make_episode
from edgellm_arena.ros.arena_link import to_image
from edgellm_arena.speech.person import person_of
from edgellm_arena.speech.rooms import hear
from edgellm_arena.speech.voice import speak
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.audio.pcm import to_int16
from edgellm_ros.ros.messaging import NANOSECONDS, to_nanoseconds, to_time

CYCLE_S, PIECE_S, BEFORE_S = 14.4, 0.4, 1.0  # of a cycle, of a chunk of sound, from a cycle's start to speech
FRAME_EVERY, IDLE_EVERY = 6, 4  # chunks; the node is at most 1.6 s behind
MOMENTS = 20
WINDOW = 50
MAX_GROWTH = 250.0  # bytes per plan
ANSWER_S = 60.0
START = 10 * NANOSECONDS
RATE = 16000


class Moment:
    """Camera frame and microphone recording of a cycle with one command."""

    def __init__(self, seed: int) -> None:
        world, person = World(make_episode(seed)), person_of(seed)
        spoken = speak(world.episode.command.text, person.voice)
        rng = np.random.default_rng(seed)
        after = CYCLE_S - BEFORE_S - spoken.seconds
        samples = to_int16(hear(spoken, person.room, rng, BEFORE_S, after).samples)[: round(CYCLE_S * RATE)]
        size = round(PIECE_S * RATE)
        self.pieces = [samples[start : start + size].tobytes() for start in range(0, len(samples), size)]
        self.frame = world.camera()
        self.answers: list[list[int]] | None = None


class Day:
    """The robot's sensors in simulated time, and the answers received."""

    def __init__(self, process: NodeProcess) -> None:
        self.process = process
        self.stamp = START
        self.answers: list[Generation] = []
        self.heard = 0
        self.sent = 0
        node, reliable = process.node, QoSProfile(depth=100)
        self._clock = node.create_publisher(Clock, "/clock", reliable)
        self._odometry = node.create_publisher(Odometry, "edgellm/odom", reliable)
        self._image = node.create_publisher(Image, "edgellm/image", reliable)
        self._audio = node.create_publisher(AudioChunk, "edgellm/audio", reliable)
        self._metrics = node.create_client(GetMetrics, "edgellm/get_metrics")
        node.create_subscription(Generation, "edgellm/generation", self.answers.append, reliable)
        node.create_subscription(AudioChunk, "edgellm/utterance", self._on_utterance, reliable)
        needed = (self._odometry, self._image, self._audio)
        if not process.spin_until(lambda: all(p.get_subscription_count() for p in needed), ANSWER_S):
            raise RuntimeError("the node has no subscriptions to the robot's sensors")

    def is_over(self, plans: int, hours: float) -> bool:
        """Return whether the day has lasted long enough and has enough answers."""
        return len(self.answers) >= plans and self.hours >= hours

    @property
    def hours(self) -> float:
        """Return the simulated time so far in hours."""
        return (self.stamp - START) / NANOSECONDS / 3600

    def live(self, moment: Moment) -> list[Generation]:
        """Run one cycle and return its answers."""
        before = len(self.answers)
        for index, piece in enumerate(moment.pieces):
            if index % FRAME_EVERY == 0:
                self._image.publish(to_image(self.stamp, moment.frame))
            chunk = AudioChunk(encoding=AudioChunk.S16LE, sample_rate=RATE, data=piece)
            chunk.header.stamp = to_time(self.stamp)
            self.stamp += round(PIECE_S * NANOSECONDS)
            self._clock.publish(Clock(clock=to_time(self.stamp)))
            odometry = Odometry()
            odometry.header.stamp = to_time(self.stamp)
            odometry.pose.pose.orientation.w = 1.0
            self._odometry.publish(odometry)
            self._audio.publish(chunk)
            self.sent += 1
            if self.sent % IDLE_EVERY == 0:
                self._wait_until_idle()
        return self.answers[before:]

    def _wait_until_idle(self) -> None:
        """Wait until the node has processed all input and its outputs have arrived."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            response = self.process.call(self._metrics, GetMetrics.Request())
            values = Counter(dict(zip(response.names, response.values, strict=True)))
            if values["audio_received"] >= self.sent and values["jobs_pending"] == 0:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the node has processed {values['audio_received']:.0f} of {self.sent} chunks of sound"
                )
            self.process.spin_until(lambda: False, 0.005)
        self.process.spin_until(
            lambda: (
                self.heard >= values["utterance_published"]
                and len(self.answers) >= values["generation_published"]
            ),
            5.0,
        )

    def _on_utterance(self, utterance: AudioChunk) -> None:
        self.heard += 1


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    plans_help = "lowest number of plans; with fewer, filling caches count as growth (default: %(default)s)"
    parser.add_argument("--plans", type=int, default=2000, help=plans_help)
    parser.add_argument("--hours", type=float, default=8.0, help="simulated hours (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="limit of real time (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    if args.plans < 4 * WINDOW:
        parser.error(f"--plans must be at least {4 * WINDOW}, got {args.plans}")
    engine = common.engine(args)
    if EngineConfig.load(engine).audio is None:
        parser.error(f"{engine} has no audio encoder: expected one, because the commands are spoken")
    moments = [Moment(common.SEED + number) for number in range(MOMENTS)]
    parameters = {"use_sim_time": True, "input_reliability": "reliable", "max_input_age": 60.0}
    count: Counter[str] = Counter()
    plans: list[int] = []  # plans so far, after each cycle
    memory: list[Memory] = []
    threads: list[int] = []
    start = time.monotonic()
    with NodeProcess(engine, watched=True, **parameters) as process:
        day = Day(process)
        while not day.is_over(args.plans, args.hours) and time.monotonic() < start + 60 * args.minutes:
            moment = moments[len(plans) % MOMENTS]
            heard = day.heard
            answers = day.live(moment)
            heard = day.heard - heard
            count["unheard"] += heard == 0
            count["lost"] += max(0, heard - len(answers))
            count["doubled"] += max(0, len(answers) - heard)
            tokens = [list(answer.token_ids) for answer in answers]
            if (
                len(plans) >= MOMENTS
            ):  # the first round starts in silence, later ones after the previous round
                moment.answers = tokens if moment.answers is None else moment.answers
                count["changed"] += moment.answers != tokens
            plans.append(len(day.answers))
            memory.append(process.memory())
            threads.append(process.threads())
        ids = [answer.request_id for answer in day.answers]
        count["doubled"] += len(ids) - len(set(ids))
        stamps = [to_nanoseconds(answer.header.stamp) for answer in day.answers]
        over, hours = day.is_over(args.plans, args.hours), day.hours
        ended_with = process.child.stop()
    half = len(plans) // 2
    sizes = {name: [getattr(now, name) for now in memory] for name in ("allocated", "free", "outside")}
    growth = {name: growth_rate(plans[half:], part[half:], MOMENTS) for name, part in sizes.items()}
    faults = {name: count[name] for name in ("lost", "doubled", "changed")}
    passed = (
        over
        and not any(faults.values())
        and count["unheard"] <= len(plans) / 20
        and stamps == sorted(stamps)
        and max(growth.values()) < MAX_GROWTH
        and threads[-1] <= threads[half]
        and ended_with == 0
    )
    return common.finish(
        "soak",
        changes={**parameters, "PYTHONMALLOC": "malloc"},
        passed=passed,
        commands=len(plans),
        unheard=count["unheard"],
        utterances=day.heard,
        plans=len(day.answers),
        simulated_hours=hours,
        real_minutes=(time.monotonic() - start) / 60,
        **faults,
        **{f"{name}_mb": _start_middle_end(part) for name, part in sizes.items()},
        **{f"{name}_bytes_per_plan": rate for name, rate in growth.items()},
        threads_warm=threads[half],
        threads_end=threads[-1],
        exit_code=ended_with,
    )


def _start_middle_end(sizes: list[int]) -> list[float]:
    """Compute medians of a window at start, middle and end, in MB."""
    half = len(sizes) // 2
    return [statistics.median(sizes[at : at + WINDOW]) / 1e6 for at in (0, half, len(sizes) - WINDOW)]


if __name__ == "__main__":
    main()
