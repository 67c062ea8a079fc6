# SPDX-License-Identifier: Apache-2.0
"""The world as a ROS node: an arm that edgellm and edgellm_arm drive.

Time is simulated and goes on in lock-step: after every 20 ms the clock stands still until edgellm_arm has
taken notice of the joint states, and after every frame until edgellm_arm follows its chunk or has refused it.
So an episode depends on its seed only, not on the speed of the computer. A frame of time t is published when
the clock is at t + `inference_delay`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from edgellm_ros.ros.parameter_table import Spec, declare, value_problem
from edgellm_ros.ros.world_link import LinkError, run_world
from edgellm_tabletop.episodes.closed_loop import delay_in_steps, goal_of, play
from edgellm_tabletop.episodes.controller import NANOSECONDS
from edgellm_tabletop.episodes.drivers import Seen, expert_view, policy_view
from edgellm_tabletop.episodes.picture import save_episode
from edgellm_tabletop.episodes.robot import START_NS, TICK_NS, Plan, Robot
from edgellm_tabletop.episodes.summary import describe
from edgellm_tabletop.ros.tabletop_link import TabletopLink
from edgellm_tabletop.world import INSTRUCTIONS, STEP_S, Tabletop

PAUSE_NS = 5 * NANOSECONDS  # between two episodes: no input of the last one is left
SPECS: dict[str, Spec] = {
    "seed": Spec(0, "Seed of the first episode; the next one has this + 1.", 0, 10**12, read_only=True),
    "episodes": Spec(1, "Number of episodes.", 1, 100_000, read_only=True),
    "expert": Spec(
        False, "Publish the scripted controller's chunks in place of the edgellm node.", read_only=True
    ),
    "inference_delay": Spec(
        0.0,
        "Simulated time from a frame to its publication, and so to its chunk, in seconds, rounded up to "
        "steps of 0.1 s.",
        0.0,
        10.0,
        read_only=True,
    ),
    "at_rest": Spec(False, "Take frames only while the arm stands.", read_only=True),
    "out": Spec("", "Folder for pictures of episodes; empty = none.", read_only=True),
    "pictures": Spec(
        3, "Number of episodes with a picture; further ones have it if they fail.", 0, 100_000, read_only=True
    ),
    "events": Spec(
        False, "Report events as JSON lines on standard output instead of the log.", read_only=True
    ),
    "resend_after": Spec(
        3.0,
        "Time without any message after which a frame is sent again, in seconds.",
        0.1,
        600.0,
        read_only=True,
    ),
    "attempts": Spec(
        10, "Maximum number of times that a frame is sent before the episode fails.", 1, 1000, read_only=True
    ),
    "active_timeout": Spec(
        60.0, "Maximum time to wait for the other nodes, in seconds.", 0.1, 3600.0, read_only=True
    ),
}


class TabletopNode(TabletopLink):
    """Plays episodes and reports events as log lines or as JSON."""

    def __init__(self) -> None:
        self._robot = Robot(Tabletop(), START_NS)
        super().__init__(self._robot.controller.follow)
        try:
            declare(self, SPECS, value_problem)
        except ValueError as error:
            raise LinkError(str(error)) from None
        if self.value("expert"):
            self.make_chunks()

    def value(self, name: str):
        """Return the value of a parameter."""
        return self.get_parameter(name).value

    def run(self) -> None:
        """Wait for the other nodes, then play all episodes.

        Raises LinkError if one cannot be finished.
        """
        self.wait_until_ready(self.value("active_timeout"))
        for number in range(self.value("episodes")):
            try:
                self.play(number, self.value("seed") + number)
            except OSError as error:  # no OpenGL, or a picture that cannot be written
                raise LinkError(str(error)) from None
        self._robot.world.close()

    def play(self, number: int, seed: int) -> None:
        """Play one episode, from the arm at rest to the outcome.

        Saves its picture if `out` is set and it is one of the first `pictures`, or has failed.
        """
        robot = self._robot
        robot.reset(seed, goal_of(seed))
        self.publish_joints(robot.now, robot.world.positions)
        self.restart_arm()
        if not self.value("expert"):
            self.set_noise_seed(seed)
        robot.now += TICK_NS  # an answer to it can be told from an earlier one
        self.tick(robot.now, robot.world.positions)
        delay = delay_in_steps(self.value("inference_delay"))
        outcome = play(robot, _TopicsDriver(self, number), delay, at_rest=self.value("at_rest"))
        self.say("")
        report = describe(robot, seed, outcome)
        if self.value("out") and (number < self.value("pictures") or outcome != "placed"):
            picture = Path(self.value("out")) / f"episode_{number:03d}.png"
            save_episode(picture, robot, seed, outcome)
            report["picture"] = str(picture)
        self.report("outcome", number=number, **report)
        while robot.now < robot.controller.end:  # until the arm rests
            robot.tick()
            self.tick(robot.now, robot.world.positions)
        robot.now += PAUSE_NS

    def report(self, event: str, **fields) -> None:
        """Report an event as a line of JSON, {"event": ..., fields}, or in the log."""
        if self.value("events"):
            print(json.dumps({"event": event, **fields}), flush=True)
        else:
            self.get_logger().info(f"{event}: {fields}")


class _TopicsDriver:
    """Lets the other nodes answer what the world's robot sees."""

    def __init__(self, node: TabletopNode, number: int) -> None:
        self._node, self._number = node, number
        self._robot, self._begin = node._robot, node._robot.now
        self._command: str | None = INSTRUCTIONS[self._robot.world.goal]

    def look(self) -> Seen:
        """Take a picture, or ask the scripted controller."""
        return (expert_view if self._node.value("expert") else policy_view)(self._robot)

    def answer(self, seen: Seen) -> Plan:
        """Send what was seen, and wait for the chunk and the arm's trajectory."""
        node = self._node
        patience = node.value("resend_after"), node.value("attempts")
        if seen.targets is not None:
            plan = node.give(seen.stamp, seen.targets, *patience)
        else:
            assert seen.image is not None
            plan = node.ask(seen.stamp, seen.image, *patience, self._command)
        self._command = None
        time = (seen.stamp - self._begin) / NANOSECONDS
        report = {name: value for name, value in asdict(plan).items() if name != "targets"}
        node.report("plan", number=self._number, time=round(time / STEP_S) * STEP_S, **report)
        return plan

    def on_tick(self) -> None:
        """Wait until the arm's node has taken notice of a tick."""
        self._node.tick(self._robot.now, self._robot.world.positions)


def run(args: Sequence[str] | None = None) -> int:
    """Run the node and return the exit code.

    0: all episodes were played, or the node was interrupted; 1: an episode could not be finished.
    """
    return run_world("tabletop", TabletopNode, args)
