# SPDX-License-Identifier: Apache-2.0
"""Driving beside clients that ask without rest.

Measures
--------
With `plan_on: image`, 0 to 4 clients that ask "what do you see?" in a loop: driving chunks and the longest
gap between them, goals of each client, and the longest time that a goal kept the engine. Target: a gap of at
most that time plus 1.5 times the gap without clients. With `plan_on: command`, typed commands at one per
second beside 0 and 4 such clients. Target: each is answered, and the median gap between two chunks is at most
1.2 times that without clients.

Conditions
----------
The node in its own process with its defaults, except `plan_on` (and autostart). Camera frames of one scene at
10 Hz, each with noise of its own as a camera's, and odometry at 20 Hz from this process; the clients, each a
PlanClient, in a third. With `--still` one frame is repeated, whose image is encoded once for all plans. All
processes compete for the cores: on a busy machine figures are larger, and only those of one run are
comparable. The longest pause between two frames of the camera, 0.1 s on an idle machine, shows how busy it
was; `node_cpu` is the processor time of the node in cores.

Examples
--------
    python -m benchmarks.driving_share
    python -m benchmarks.driving_share --seconds 60 --driving-plans-per-goal 3
    python -m benchmarks.driving_share --max-concurrent-plans 1 --still

Last JSON line: `driving` (one entry for each number of clients), `commands`, `changed` (parameters) and
`passed`.

"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from edgellm_ros.msg import ActionChunk, Generation
from edgellm_ros.srv import GetMetrics
from nav_msgs.msg import Odometry
from sensor_msgs.msg import Image
from std_msgs.msg import String

from benchmarks import common
from benchmarks.node_process import NodeProcess
from edgellm_arena.episodes.episode import World, make_episode
from edgellm_arena.ros.arena_link import to_image
from edgellm_ros.client import PlanClient, PlanError

QUESTION = "what do you see?"
FRAMES_HZ, ODOMETRY_HZ = 10.0, 20.0
CLIENTS = 4
FRAMES, NOISE = 100, 2  # frames until they repeat: more than the prefix cache holds; levels of 255
START_S, WARM_UP_S, COMMAND_PERIOD_S, LAST_ANSWER_S = 30.0, 2.0, 1.0, 5.0
MOST_OF_GAP_ALONE = 1.2  # the gap between the chunks of commands beside clients


class Robot:
    """The sensors of a robot that stands, and what the node answers to its commands."""

    def __init__(self, process: NodeProcess, still: bool = False) -> None:
        world = World(make_episode(common.SEED))
        self.command = world.episode.command.text
        self._process, self._node = process, process.node
        self._camera = itertools.cycle([world.camera()] if still else noisy_frames(world.camera()))
        self._image = self._node.create_publisher(Image, "edgellm/image", 1)
        self._odometry = self._node.create_publisher(Odometry, "edgellm/odom", 10)
        self._commands = self._node.create_publisher(String, "edgellm/command", 10)
        self.chunks: list[float] = []  # times of driving chunks
        self.frames: list[float] = []  # times of camera frames
        self.answered: set[str] = set()  # ids of commands
        self._node.create_subscription(ActionChunk, "edgellm/action_chunk", self._on_chunk, 100)
        self._node.create_subscription(Generation, "edgellm/generation", self._on_answer, 100)
        self._node.create_timer(1 / FRAMES_HZ, self._publish_frame)
        self._node.create_timer(1 / ODOMETRY_HZ, self._publish_odometry)
        self._metrics = self._node.create_client(GetMetrics, "edgellm/get_metrics")
        self._connect()

    def say(self, text: str) -> None:
        """Publish a typed command."""
        self._commands.publish(String(data=text))

    def live(self, seconds: float) -> None:
        """Publish frames and odometry, and receive answers."""
        self._process.spin_until(lambda: False, seconds)

    def metrics(self) -> dict[str, float]:
        """Return the node's metrics."""
        response = self._process.call(self._metrics, GetMetrics.Request())
        return dict(zip(response.names, response.values, strict=True))

    def _connect(self) -> None:
        """Wait until the node hears commands and frames."""
        deadline = time.monotonic() + 30.0
        while not self.metrics()["commands_received"] or not self.metrics()["frames_received"]:
            if time.monotonic() > deadline:
                raise RuntimeError("the node receives no commands and frames after 30 s")
            self.say("")
            self.live(0.2)

    def _publish_frame(self) -> None:
        self.frames.append(time.monotonic())
        self._image.publish(to_image(self._node.get_clock().now().nanoseconds, next(self._camera)))

    def _publish_odometry(self) -> None:
        message = Odometry()
        message.header.stamp = self._node.get_clock().now().to_msg()
        message.pose.pose.orientation.w = 1.0
        self._odometry.publish(message)

    def _on_chunk(self, chunk: ActionChunk) -> None:
        if chunk.request_id.startswith("command-"):
            self.chunks.append(time.monotonic())

    def _on_answer(self, answer: Generation) -> None:
        if answer.request_id.startswith("command-"):
            self.answered.add(answer.request_id)


def noisy_frames(frame: np.ndarray) -> list[np.ndarray]:
    """Make frames of a scene as a camera does, of which no two are equal."""
    rng = np.random.default_rng(common.SEED)
    noise = (rng.integers(-NOISE, NOISE + 1, frame.shape, np.int16) for _ in range(FRAMES))
    return [np.clip(frame + each, 0, 255).astype(np.uint8) for each in noise]


@dataclass
class Asked:
    """What a client asked while it was counted."""

    goals: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # goals by the reason why they did not complete
    engine_s: list[float] = field(default_factory=list)  # for which each goal kept the engine


class Asking:
    """Context manager that runs clients in a process of their own.

    Each client asks, waits for the answer, and asks again. In the robot's process the clients would hold up
    its camera.
    """

    def __init__(self, robot: Robot, count: int) -> None:
        self._robot, self._count = robot, count
        spawn = get_context("spawn")  # a forked process would have the threads of ROS in an unknown state
        self._counting, self._over = spawn.Event(), spawn.Event()
        self._pipe, others_end = spawn.Pipe()
        arguments = (count, self._counting, self._over, others_end)
        self._process = spawn.Process(target=_ask_in_threads, args=arguments, daemon=True)

    def __enter__(self) -> Asking:
        if self._count:
            self._process.start()
            deadline = time.monotonic() + START_S
            while not self._pipe.poll():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self._count} clients have no answers after {START_S:.0f} s")
                self._robot.live(0.2)
            self._pipe.recv()
        self._robot.live(WARM_UP_S)
        self._counting.set()
        return self

    def stop(self) -> list[Asked]:
        """Let the last answers come, and return what each client asked."""
        self._counting.clear()
        self._over.set()
        return self._pipe.recv() if self._count else []

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._count:
            self._process.join(START_S)


def _ask_in_threads(count: int, counting: Any, over: Any, pipe: Any) -> None:
    """Run clients until `over`; report when each has an answer, then what each asked."""
    asked, answered = [Asked() for _ in range(count)], threading.Barrier(count + 1)
    threads = [threading.Thread(target=_ask, args=(each, answered, counting, over)) for each in asked]
    for thread in threads:
        thread.start()
    answered.wait()
    pipe.send("ready")
    for thread in threads:
        thread.join()
    pipe.send(asked)


def _ask(asked: Asked, answered: threading.Barrier, counting: Any, over: Any) -> None:
    with PlanClient() as client:
        client.plan(QUESTION)
        answered.wait()
        while not over.is_set():
            try:
                answer = client.plan(QUESTION).reply.generation
            except PlanError as error:
                reason = error.result.termination_reason if error.result is not None else str(error)
                asked.failed[reason] += counting.is_set()
                continue
            if counting.is_set():
                asked.goals += 1
                asked.engine_s.append(answer.total_latency - answer.queue_latency)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--driving-plans-per-goal", type=int, help="parameter of the node (default: the node's)"
    )
    parser.add_argument(
        "--max-concurrent-plans", type=int, help="parameter of the node (default: the node's)"
    )
    parser.add_argument("--still", action="store_true", help="repeat one camera frame")
    args = parser.parse_args(arguments)
    engine = common.engine(args)
    given = {name: getattr(args, name) for name in ("driving_plans_per_goal", "max_concurrent_plans")}
    changes = {name: value for name, value in given.items() if value is not None}
    print("the node's defaults, except", {"plan_on": "image (driving)", **changes}, flush=True)
    driving = drive(engine, args.seconds, changes, args.still)
    alone, beside = command(engine, args.seconds, changes, args.still)
    passed = (
        all(run["longest_gap"] <= run["allowed_gap"] for run in driving)
        and beside["answered"] == beside["sent"]
        and beside["median_gap"] <= MOST_OF_GAP_ALONE * alone["median_gap"]
    )
    return common.finish(
        "driving_share",
        changes={"plan_on": "image in the runs of driving", **changes},
        still=args.still,
        seconds=args.seconds,
        driving=driving,
        commands=[alone, beside],
        passed=passed,
    )


def drive(engine: Path, seconds: float, changes: dict[str, int], still: bool) -> list[dict[str, Any]]:
    """Drive on every frame beside 0 to 4 clients."""
    runs: list[dict[str, Any]] = []
    print(
        "clients  driving chunks  median gap  longest gap  allowed  longest goal  pause of camera"
        "  node's cores  goals by client"
    )
    with NodeProcess(engine, plan_on="image", **changes) as process:
        robot = Robot(process, still)
        robot.say(robot.command)
        robot.live(WARM_UP_S)
        for count in range(CLIENTS + 1):
            with Asking(robot, count) as clients:
                robot.chunks.clear()
                robot.frames.clear()
                busy = process.processor_seconds()
                robot.live(seconds)
                busy = process.processor_seconds() - busy
                chunks, frames = list(robot.chunks), list(robot.frames)
                asked = clients.stop()
            goals, engine_s = [each.goals for each in asked], [s for each in asked for s in each.engine_s]
            if len(chunks) < 2:
                raise RuntimeError(f"{len(chunks)} driving chunks beside {count} clients")
            gaps = [after - before for before, after in pairwise(chunks)]
            longest_goal = max(engine_s, default=0.0)
            alone = runs[0]["longest_gap"] if runs else max(gaps)
            run = {
                "clients": count,
                "driving_chunks": len(chunks),
                "longest_gap": max(gaps),
                "median_gap": statistics.median(gaps),
                "allowed_gap": longest_goal + 1.5 * alone,
                "longest_goal": longest_goal,
                "node_cpu": busy / seconds,
                "goals": goals,
                "goals_failed": dict(sum((each.failed for each in asked), Counter())),
                "longest_pause_of_camera": max(after - before for before, after in pairwise(frames)),
            }
            runs.append(run)
            print(
                f"{count:7}{len(chunks):16}{run['median_gap']:10.3f} s{max(gaps):11.2f} s"
                f"{run['allowed_gap']:7.2f} s{longest_goal:12.2f} s"
                f"{run['longest_pause_of_camera']:15.2f} s{run['node_cpu']:14.2f}"
                f"  {', '.join(map(str, goals)) or '-'}",
                flush=True,
            )
    return runs


def command(engine: Path, seconds: float, changes: dict[str, int], still: bool) -> list[dict[str, Any]]:
    """Send a typed command each second, beside 0 and 4 clients."""
    runs: list[dict[str, Any]] = []
    with NodeProcess(engine, **changes) as process:
        robot = Robot(process, still)
        for count in (0, CLIENTS):
            with Asking(robot, count) as clients:
                robot.chunks.clear()
                robot.answered.clear()
                sent = round(seconds / COMMAND_PERIOD_S)
                busy = process.processor_seconds()
                for _ in range(sent):
                    robot.say(robot.command)
                    robot.live(COMMAND_PERIOD_S)
                busy = process.processor_seconds() - busy
                process.spin_until(lambda sent=sent: len(robot.answered) == sent, LAST_ANSWER_S)
                goals = [each.goals for each in clients.stop()]
            gaps = [after - before for before, after in pairwise(robot.chunks)]
            run = {
                "clients": count,
                "sent": sent,
                "answered": len(robot.answered),
                "median_gap": statistics.median(gaps),
                "longest_gap": max(gaps),
                "node_cpu": busy / (sent * COMMAND_PERIOD_S),
                "goals": goals,
            }
            runs.append(run)
            print(
                f"{run['answered']} of {sent} commands answered beside {count} clients, median gap "
                f"{run['median_gap']:.2f} s, longest {max(gaps):.2f} s, {run['node_cpu']:.2f} cores, goals "
                f"{', '.join(map(str, goals)) or '-'}",
                flush=True,
            )
    return runs


if __name__ == "__main__":
    main()
