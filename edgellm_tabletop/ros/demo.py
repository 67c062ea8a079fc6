# SPDX-License-Identifier: Apache-2.0
"""`edgellm demo --arm`: the world, edgellm and edgellm_arm in closed loop.

Each is a process. This one supervises them: it exports the policy if its engine is missing or outdated,
starts the processes in a ROS domain of their own, shows the world's events (JSON lines through a pipe), and
ends the processes on every way out.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_ros.engine.device import open_device
from edgellm_ros.ros.processes import (
    ARM_MODULE,
    NODE_MODULE,
    Child,
    own_domain,
    require_ros,
    ros_arguments,
    ros_environment,
    terminated_as_interrupted,
)
from edgellm_ros.ros.world_events import play_episodes
from edgellm_tabletop.episodes.drivers import CONTRACT, arm_settings, contract
from edgellm_tabletop.episodes.summary import summarise, times_of
from edgellm_tabletop.evaluation.task import export_policy
from edgellm_tabletop.ros.display import Display

WORLD_MODULE = "edgellm_tabletop.ros.main"


@dataclass(frozen=True)
class DemoOptions:
    """The episodes to play, the policy, and the folders."""

    episodes: int
    seed: int
    out: Path
    engine_dir: Path
    checkpoint: Path | None  # None: the scripted controller makes the chunks
    device: str = "cpu"
    precision: str = "fp32"
    inference_delay: float = 0.0  # s
    follow_time: float = 0.0  # s, of a chunk; the arm then rests until the next. 0: it is followed until then


def run_demo(options: DemoOptions, display: Display) -> dict[str, Any]:
    """Play all episodes and return the summary.

    Raises ImportError without ROS 2, EngineError for a device that is not available, ValueError or
    FileNotFoundError for a checkpoint that is not a policy for this arm, DemoError if an episode does not
    end.
    """
    require_ros("the demo")
    if options.checkpoint is not None:
        open_device(options.device)
        export_policy(options.checkpoint, options.engine_dir, display.status, options.precision)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(terminated_as_interrupted())
        environment = ros_environment(stack.enter_context(own_domain()))
        display.status("starting the nodes and the world ...")

        def start(name: str, arguments: list[str], pipe: bool = False) -> Child:
            log = options.out / f"{name.replace(' ', '_')}.log"
            child = Child(name, arguments, log, environment, pipe=pipe)
            stack.callback(child.stop)
            return child

        nodes = [start("edgellm_arm node", arm_arguments(options))]
        if options.checkpoint is not None:
            nodes.append(start("edgellm node", node_arguments(options)))
        world = start("tabletop", world_arguments(options), pipe=True)
        for event in play_episodes(world, nodes, options.episodes):
            display.show(event)
            if event["event"] == "outcome":
                outcomes.append(event)
    return {**summarise(outcomes), "measured": times_of(outcomes), "drives": outcomes}


def node_arguments(options: DemoOptions) -> list[str]:
    """Return the command line of the edgellm node, which plans on every frame."""
    (camera,) = contract().cameras
    parameters = {
        "engine_dir": str(options.engine_dir.resolve()),
        "device": options.device,
        "plan_on": "image",
        "autostart": True,
        "use_sim_time": True,
        "odom_wait": 5.0,
        "max_input_age": 1.0 + options.inference_delay,
        "input_reliability": "reliable",
    }
    names = {"~/image": camera.topic, "~/joint_states": "edgellm_arm/state"}
    return ["-m", NODE_MODULE, *ros_arguments(parameters), *_remapped(names)]


def arm_arguments(options: DemoOptions) -> list[str]:
    """Return the command line of edgellm_arm, which moves the arm."""
    parameters = {
        "contract": str(CONTRACT),
        "dry_run": False,
        "autostart": True,
        "use_sim_time": True,
        **arm_settings(options.inference_delay, follow_time=options.follow_time),
    }
    if options.checkpoint is not None:
        parameters["engine_dir"] = str(options.engine_dir.resolve())
    return [
        "-m",
        ARM_MODULE,
        *ros_arguments(parameters),
        *_remapped({"~/action_chunk": "edgellm/action_chunk"}),
    ]


def world_arguments(options: DemoOptions) -> list[str]:
    """Return the command line of the world, which reports events as JSON lines."""
    parameters = {
        "seed": options.seed,
        "episodes": options.episodes,
        "expert": options.checkpoint is None,
        "inference_delay": float(options.inference_delay),
        "at_rest": options.follow_time > 0,
        "out": str(options.out.resolve()),
        "events": True,
    }
    return ["-m", WORLD_MODULE, *ros_arguments(parameters)]


def _remapped(names: dict[str, str]) -> list[str]:
    return [word for old, new in names.items() for word in ("-r", f"{old}:={new}")]
