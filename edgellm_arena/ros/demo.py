# SPDX-License-Identifier: Apache-2.0
"""`edgellm demo`: the arena and the edgellm node in closed loop, as two processes.

A third one is the follower, if it drives. This process supervises them: it exports the engines if they are
missing or outdated, starts the processes in a ROS domain of their own, shows the arena's events (JSON lines
through a pipe), and ends the processes on every way out.
"""

from __future__ import annotations

import dataclasses
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_arena.episodes.delayed_loop import Execution
from edgellm_arena.ros.display import Display
from edgellm_arena.world.unicycle import DT
from edgellm_ros.builder.export_cache import export_if_needed
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.ros.processes import (
    FOLLOWER_MODULE,
    NODE_MODULE,
    Child,
    own_domain,
    require_ros,
    ros_arguments,
    ros_environment,
    terminated_as_interrupted,
)
from edgellm_ros.ros.world_events import play_episodes
from edgellm_ros.runtime.adapters.lora import canonical_name, find_adapter

ARENA_MODULE = "edgellm_arena.ros.main"
QUESTION = "what do you see?"  # before each episode's command
JUMPS = (  # of the arena's event `outcome`, with execution async or wait
    "jerk_at_changes",
    "excess_jerk_at_changes",
    "jerk_within_plans",
    "yaw_acceleration_at_changes",
    "excess_yaw_acceleration_at_changes",
    "yaw_acceleration_within_plans",
)


@dataclass(frozen=True)
class DemoOptions:
    """The episodes to play, the model, and the folders."""

    episodes: int
    seed: int
    out: Path
    engine_dir: Path
    checkpoint: Path
    device: str
    action_samples: int
    first_episode: int = 0  # of those of the seed
    family: str = ""  # of all episodes; empty = as the seed decides
    spoken: bool = False
    speech_engine: Path | None = None  # that transcribes spoken commands; None: the model itself hears
    lora: str = ""
    decode: str = "auto"
    precision: str = "fp32"
    follower: bool = False
    inference_delay: float = 0.0  # s
    execution: str = "auto"
    voice: str = ""  # of the robot, in the sound of an episode; empty = no such file
    chunking: str = "off"  # or "auto", which run_demo resolves


def resolved(options: DemoOptions, config: EngineConfig) -> DemoOptions:
    """Return the options with the chunking that drives best, if it is "auto".

    While plans take time, that is to continue chunks, if the checkpoint was trained for it: see
    docs/real_time_chunking.md.
    """
    if options.chunking != "auto":
        return options
    learned = config.action is not None and config.action.rtc_max_delay > 0
    driving = options.inference_delay > 0 and options.execution in ("auto", Execution.ASYNC.value)
    return dataclasses.replace(options, chunking="trained" if learned and driving else "off")


def run_demo(options: DemoOptions, display: Display) -> dict[str, Any]:
    """Play all episodes and return the summary.

    Raises ImportError without ROS 2, EngineError for a device that is not available or for speech to a
    model without audio encoder, ValueError or FileNotFoundError for a bad checkpoint or an unknown adapter,
    DemoError if an episode does not end.
    """
    require_ros("the demo")
    open_device(options.device)
    config = export_if_needed(
        options.checkpoint,
        options.engine_dir,
        lambda: display.status(f"exporting {options.checkpoint} to {options.engine_dir} ..."),
        precision=options.precision,
    )
    options = resolved(options, config)
    find_adapter(options.engine_dir, options.lora)
    if options.spoken and options.speech_engine is None and config.audio is None:
        raise EngineError(
            f"{options.checkpoint} has no audio encoder: leave --spoken out, or name a checkpoint with one "
            "or a --speech-engine"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(terminated_as_interrupted())
        environment = ros_environment(stack.enter_context(own_domain()))
        display.status("starting the edgellm node and the arena ...")
        node = Child("edgellm node", node_arguments(options), options.out / "edgellm_node.log", environment)
        stack.callback(node.stop)
        nodes = [node]
        if options.follower:
            log = options.out / "edgellm_follower.log"
            follower = Child("follower", follower_arguments(), log, environment)
            stack.callback(follower.stop)
            nodes.append(follower)
        arena = Child("arena", arena_arguments(options), options.out / "arena.log", environment, pipe=True)
        stack.callback(arena.stop)
        for event in play_episodes(arena, nodes, options.episodes):
            display.show(event)
            if event["event"] == "outcome":
                outcomes.append(event)
    return {"lora": canonical_name(options.lora), **summarise(outcomes, options.spoken)}


def node_arguments(options: DemoOptions) -> list[str]:
    """Return the command line of the edgellm node, which plans on every frame."""
    parameters = {
        "engine_dir": str(options.engine_dir.resolve()),
        "device": options.device,
        "decode": options.decode,
        "drafting": "off",  # pauses by the clock, and changes last bits: an episode follows from its seed
        "plan_on": "image",
        "action_samples": options.action_samples,
        "lora": options.lora,
        "autostart": True,
        "use_sim_time": True,
        "odom_wait": 5.0,
        "max_input_age": 1.0 + options.inference_delay,
        "input_reliability": "reliable",
    }
    if options.speech_engine is not None:
        parameters["speech_engine_dir"] = str(options.speech_engine.resolve())
    if options.chunking != "off":
        parameters["chunking"] = options.chunking
    return ["-m", NODE_MODULE, *ros_arguments(parameters)]


def arena_arguments(options: DemoOptions) -> list[str]:
    """Return the command line of the arena, which reports events as JSON lines."""
    parameters = {
        "seed": options.seed,
        "episodes": options.episodes,
        "first_episode": options.first_episode,
        "family": options.family,
        "out": str(options.out.resolve()),
        "question": QUESTION,
        "spoken": options.spoken,
        "voice": options.voice,
        "transcribed": options.speech_engine is not None,
        "follower": options.follower,
        "execution": options.execution,
        "inference_delay": float(options.inference_delay),
        "events": True,
    }
    if options.chunking != "off" and options.execution == "auto" and not options.follower:
        parameters["execution"] = Execution.ASYNC.value
    return ["-m", ARENA_MODULE, *ros_arguments(parameters)]


def follower_arguments() -> list[str]:
    """Return the command line of the follower.

    The follower gives one stamped command for each step of the arena.
    """
    parameters = {"rate": 1.0 / DT, "stamped": True, "autostart": True, "use_sim_time": True}
    remappings = {"~/action_chunk": "edgellm/action_chunk", "~/odom": "edgellm/odom"}
    rules = [word for old, new in remappings.items() for word in ("-r", f"{old}:={new}")]
    return ["-m", FOLLOWER_MODULE, *ros_arguments(parameters), *rules]


def summarise(outcomes: list[dict[str, Any]], spoken: bool) -> dict[str, Any]:
    """Summarise all episodes: counts, and times of plans by this computer's clock.

    `median_part_seconds` tells how a plan's time splits: stages of the runtime, `node` (the rest of the time
    in the edgellm node) and `topics` (the time outside of it).
    `understood` counts spoken commands whose first answer names the right object. Speeds are means in m/s
    while the robot moved; clearances are the minimum in m between the robot's edge and a solid other than its
    target.
    """
    speeds = [outcome["mean_speed"] for outcome in outcomes if outcome["mean_speed"]]
    plans = [seconds for outcome in outcomes for seconds in outcome["plan_seconds"]]
    words = [seconds for outcome in outcomes for seconds in outcome["first_words_seconds"]]
    understood = {"understood": sum(outcome["understood"] for outcome in outcomes)} if spoken else {}
    return {
        "episodes": len(outcomes),
        "successes": sum(outcome["outcome"] == "success" for outcome in outcomes),
        "collisions": sum(outcome["outcome"] == "collision" for outcome in outcomes),
        "timeouts": sum(outcome["outcome"] == "timeout" for outcome in outcomes),
        **understood,
        "simulated_seconds": sum(outcome["time"] for outcome in outcomes),
        "plans": len(plans),
        # Without a heard command there are no plans.
        "mean_plan_seconds": statistics.fmean(plans or [0.0]),
        "median_plan_seconds": statistics.median(plans or [0.0]),
        "p99_plan_seconds": float(np.percentile(plans or [0.0], 99)),
        "median_first_words_seconds": statistics.median(words or [0.0]),
        "median_part_seconds": {
            part: statistics.median(
                [seconds for outcome in outcomes for seconds in outcome["part_seconds"][part]] or [0.0]
            )
            for part in outcomes[0]["part_seconds"]
        },
        "clipped_actions": sum(outcome["clipped_actions"] for outcome in outcomes),
        "mean_speed": statistics.fmean(speeds or [0.0]),
        "least_clearance": min(outcome["least_clearance"] for outcome in outcomes),
        **summarise_jumps(outcomes),
        "failed": [
            {key: o[key] for key in ("number", "seed", "outcome")}
            for o in outcomes
            if o["outcome"] != "success"
        ],
        "drives": [
            {key: o[key] for key in ("number", "seed", "outcome", "time", "mean_speed", "least_clearance")}
            for o in outcomes
        ],
        "pictures": [outcome["picture"] for outcome in outcomes],
    }


def summarise_jumps(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the jumps of motion of all episodes.

    Empty if the arena did not report them. `changes` is the number of changes from one plan to another, or to
    braking and back. Each other value has `mean` and `p95`, in m/s^3 and rad/s^2; None without values.
    """
    if "jerk_at_changes" not in outcomes[0]:
        return {}
    pooled = {name: [value for o in outcomes for value in o[name]] for name in JUMPS}
    summary: dict[str, Any] = {"changes": len(pooled["jerk_at_changes"])}
    for name, values in pooled.items():
        mean_and_p95 = (float(np.mean(values)), float(np.percentile(values, 95))) if values else (None, None)
        summary[name] = dict(zip(("mean", "p95"), mean_and_p95, strict=True))
    return summary
