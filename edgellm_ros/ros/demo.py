# SPDX-License-Identifier: Apache-2.0
"""`edgellm demo`: the arena and the edgellm node in two processes, closed loop over ROS 2 topics, until all
episodes are played.

This process only looks after the two: it exports the engines if they are missing or older than the
checkpoint, starts both in a ROS domain of their own, shows what the arena tells (JSON lines through a pipe),
and ends both on every way out.
"""

from __future__ import annotations

import importlib.util
import json
import selectors
import signal
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_ros.builder.freshness import export_if_needed
from edgellm_ros.engine.device import open_device
from edgellm_ros.ros.display import Display
from edgellm_ros.ros.processes import Child, own_domain, ros_environment

NODE_MODULE = "edgellm_ros.ros.main"
ARENA_MODULE = "edgellm_ros.ros.arena_node"
QUESTION = "what do you see?"  # before each episode's command
SILENCE_S = 180.0  # the arena gives up sooner by itself: no answer is an error within 90 s


class DemoError(RuntimeError):
    """An episode did not finish; the message says why, with the end of the log of the process that failed."""


@dataclass(frozen=True)
class DemoOptions:
    """What to play and where things are. `out` gets pictures and logs; of the samples one is driven."""

    episodes: int
    seed: int
    out: Path
    engine_dir: Path
    checkpoint: Path
    device: str
    action_samples: int


def run_demo(options: DemoOptions, display: Display) -> dict[str, Any]:
    """Play all episodes and return the summary.

    ImportError without ROS 2, EngineError for a device that is not there, ValueError or FileNotFoundError
    for a bad checkpoint, DemoError if an episode does not finish.
    """
    require_ros()
    open_device(options.device)
    export_if_needed(
        options.checkpoint,
        options.engine_dir,
        lambda: display.status(f"exporting {options.checkpoint} to {options.engine_dir} ..."),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(_terminated_as_interrupted())
        environment = ros_environment(stack.enter_context(own_domain()))
        display.status("starting the edgellm node and the arena ...")
        node = Child("edgellm node", node_arguments(options), options.out / "edgellm_node.log", environment)
        stack.callback(node.stop)
        arena = Child("arena", arena_arguments(options), options.out / "arena.log", environment, pipe=True)
        stack.callback(arena.stop)
        for event in arena_events(arena, node):
            display.show(event)
            if event["event"] == "outcome":
                outcomes.append(event)
    if len(outcomes) != options.episodes:
        raise DemoError(
            f"the arena ended after {len(outcomes)} of {options.episodes} episodes; {_tail(arena)}"
        )
    return summarise(outcomes)


def require_ros() -> None:
    """ImportError with a way out unless rclpy and our compiled interfaces can be imported."""
    for module in ("rclpy", "edgellm_ros.msg"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                f"no Python module {module}: the demo needs ROS 2 and this package built for it; "
                "`make demo` in a clone brings both"
            )


def node_arguments(options: DemoOptions) -> list[str]:
    """How the edgellm node is started: it plans on each new frame while a command stands."""
    parameters = {
        "engine_dir": str(options.engine_dir.resolve()),
        "device": options.device,
        "plan_on": "image",
        "action_samples": options.action_samples,
        "autostart": True,
        "use_sim_time": True,
        "odom_wait": 5.0,
    }
    return ["-m", NODE_MODULE, *_ros_args(parameters)]


def arena_arguments(options: DemoOptions) -> list[str]:
    """How the arena is started: it tells what happens as JSON lines."""
    parameters = {
        "seed": options.seed,
        "episodes": options.episodes,
        "out": str(options.out.resolve()),
        "question": QUESTION,
        "events": True,
    }
    return ["-m", ARENA_MODULE, *_ros_args(parameters)]


def arena_events(arena: Child, node: Child) -> Iterator[dict[str, Any]]:
    """What the arena tells, until it ends; DemoError if it fails, if the node ends, or if nothing is heard
    for long.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(arena.stdout, selectors.EVENT_READ)
        silent_s, poll_s = 0.0, 0.5
        while True:
            if selector.select(poll_s):
                line = arena.stdout.readline()
                if not line:
                    break
                silent_s = 0.0
                yield json.loads(line)
                continue
            silent_s += poll_s
            if node.process.poll() is not None:
                raise DemoError(
                    f"the edgellm node ended with exit code {node.process.returncode}; {_tail(node)}"
                )
            if silent_s > SILENCE_S:
                raise DemoError(f"nothing heard from the arena for {SILENCE_S:.0f} s; {_tail(arena)}")
    code = arena.process.wait()
    if node.process.poll() is not None:
        raise DemoError(f"the edgellm node ended with exit code {node.process.returncode}; {_tail(node)}")
    if code:
        raise DemoError(f"the arena ended with exit code {code}; {_tail(arena)}\n{_tail(node)}")


def summarise(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and mean times over all episodes; times are those of the computer's clock, over the topics."""
    plans = [seconds for outcome in outcomes for seconds in outcome["plan_seconds"]]
    words = [seconds for outcome in outcomes for seconds in outcome["first_words_seconds"]]
    return {
        "episodes": len(outcomes),
        "successes": sum(outcome["outcome"] == "success" for outcome in outcomes),
        "collisions": sum(outcome["outcome"] == "collision" for outcome in outcomes),
        "timeouts": sum(outcome["outcome"] == "timeout" for outcome in outcomes),
        "simulated_seconds": sum(outcome["time"] for outcome in outcomes),
        "plans": len(plans),
        "mean_plan_seconds": statistics.fmean(plans),
        "median_plan_seconds": statistics.median(plans),
        "median_first_words_seconds": statistics.median(words),
        "clipped_actions": sum(outcome["clipped_actions"] for outcome in outcomes),
        "failed": [
            {key: o[key] for key in ("number", "seed", "outcome")}
            for o in outcomes
            if o["outcome"] != "success"
        ],
        "pictures": [outcome["picture"] for outcome in outcomes],
    }


def _ros_args(parameters: dict[str, str | int | float | bool]) -> list[str]:
    arguments = ["--ros-args"]
    for name, value in parameters.items():
        arguments += ["-p", f"{name}:={json.dumps(value)}"]  # JSON is YAML, which ROS reads values as
    return arguments


def _tail(child: Child) -> str:
    return f"the end of {child.log}:\n{child.log_tail()}"


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM takes the same way out as Ctrl-C."""

    def interrupt(signum, frame) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
