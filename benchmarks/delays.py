# SPDX-License-Identifier: Apache-2.0
"""Motion under latency: success and smoothness with an added inference delay.

Measures
--------
Successes, collisions, time to the target, and the jerk (m/s^3) and yaw acceleration (rad/s^2) where one plan
takes over from another, beside those within plans, for each mode and delay:

    wait                      the robot brakes to a standstill for each frame, and stands until its plan comes
    naive                     the old chunk runs on; the new one takes over at the row of its age
    guided, frozen, trained   as naive, with the node's parameter `chunking`
    guided:24                 the same with its parameter chunking_horizon
    driver                    the analytic driver of the training data, which knows the scene and needs no
                              time: the jerk of the motion itself, for comparison

Target: with 0.8 s, the best form of chunking has at most 2 of 100 successes less than without delay, and at
most a third of the mean jerk at changes of the naive mode.

Conditions
----------
The way of `edgellm demo`: node and arena in processes of their own, over ROS topics. Time is simulated: a
frame of time t is published when /clock is at t + delay, and the clock stands still until its plan arrives.
The results therefore follow from the seed, not from the computer's speed. A plan is made every 0.8 s, or as
soon as the last one has arrived. An episode begins with the command to stop, whose plan tells the node its
latency. Each worker has a node and an arena in a ROS domain of its own, on one core. `driver` drives in the
worker itself, without ROS, and once for all delays.

Examples
--------
    python -m benchmarks.delays
    python -m benchmarks.delays --delays 0.8 --modes naive,guided,guided:24 --episodes 20 --workers 4

A JSON line for each mode and delay, then a table; last JSON line: all of them in `results`.

"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.analytic_driver import play_driver
from edgellm_arena.ros.demo import (
    ARENA_MODULE,
    JUMPS,
    DemoOptions,
    node_arguments,
    summarise,
)
from edgellm_ros.cli.arena_options import add_episodes, add_seed
from edgellm_ros.cli.arguments import integer, number
from edgellm_ros.diffusion.chunking import FORMS
from edgellm_ros.ros.processes import Child, own_domain, ros_arguments, ros_environment
from edgellm_ros.ros.world_events import DemoError, world_events

MODES = ("wait", "naive", *FORMS)  # of a node
DRIVER = "driver"
SEED = 90  # episodes 90000 and following
ATTEMPTS = 2  # of each piece of work
FIRST_COMMAND = "stop"  # of each episode; its plan has actions, so that the node knows their latency


@dataclass(frozen=True)
class Case:
    """One mode with one delay."""

    mode: str
    horizon: int  # the node's parameter chunking_horizon
    delay: float  # s

    @property
    def name(self) -> str:
        """The mode as it is given on the command line."""
        return f"{self.mode}:{self.horizon}" if self.horizon else self.mode

    def options(self, engine: Path, seed: int) -> DemoOptions:
        """Return the options of a demo that drives in this way."""
        return DemoOptions(
            episodes=1,
            seed=seed,
            out=Path(),
            engine_dir=engine,
            checkpoint=Path(),
            device="cpu",
            action_samples=1,
            inference_delay=self.delay,
            execution="wait" if self.mode == "wait" else "async",
            chunking=self.mode if self.mode in FORMS else "off",
        )


@dataclass(frozen=True)
class Work:
    """Episodes of one case that one node and one arena drive."""

    case: Case
    options: DemoOptions
    first: int
    episodes: int


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--delays",
        type=common.numbers(number(0.0, 60.0)),
        default="0,0.4,0.8",
        help="in seconds, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--modes",
        default=",".join((*MODES, DRIVER)),
        help=f"of {', '.join(MODES)} and {DRIVER}, separated by commas; guided:24 sets the node's parameter "
        "chunking_horizon (default: %(default)s)",
    )
    add_episodes(parser, 1000, 100, "for each case")
    add_seed(parser, SEED, "seed of the episodes")
    parser.add_argument(
        "--workers",
        type=integer(1),
        default=1,
        help="pairs of node and arena at a time (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="device of the engines (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="file that gets a JSON line for each episode")
    args = parser.parse_args(arguments)
    cases = []
    for delay in args.delays:
        for word in args.modes.split(","):
            mode, _, horizon = word.partition(":")
            if word != DRIVER and (mode not in MODES or not (horizon or "0").isdecimal()):
                known = f"{', '.join(MODES)}, with :HORIZON, and {DRIVER}"
                parser.error(f"--modes: expected some of {known}, got {word!r}")
            case = Case(mode, int(horizon or 0), 0.0 if mode == DRIVER else delay)
            if case not in cases:
                cases.append(case)
    results = play_cases(cases, args)
    print(table(results), file=sys.stderr)
    if any(result["episodes"] < args.episodes for result in results):
        raise SystemExit("some episodes did not end; see above")
    return common.finish("delays", episodes=args.episodes, seed=args.seed, results=results)


def play_cases(cases: list[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Play the episodes of all cases and return their results.

    A line is printed for each finished case.
    """
    engine = common.engine(args) if any(case.mode != DRIVER for case in cases) else args.engine
    size = -(-args.episodes // args.workers)
    outcomes: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    results: dict[Case, dict[str, Any]] = {}
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for core in range(args.workers):
        cores.put(core)
    start = time.monotonic()
    with ProcessPoolExecutor(args.workers, context, take_core, (cores,)) as pool:
        futures, pieces = {}, Counter[Case]()
        for case in cases:
            options = dataclasses.replace(case.options(engine, args.seed), device=args.device)
            for first in range(0, args.episodes, size):
                work = Work(case, options, first, min(size, args.episodes - first))
                futures[pool.submit(play, work)] = work
                pieces[case] += 1
        for future in as_completed(futures):
            case = futures[future].case
            try:
                played = future.result()
            except DemoError as error:
                print(f"{case.name} {case.delay:g} s: {error}", file=sys.stderr, flush=True)
                played = []
            outcomes[case] += played
            pieces[case] -= 1
            progress = f"{case.name} {case.delay:g} s, {len(outcomes[case])} episodes"
            print(f"{time.monotonic() - start:4.0f} s: {progress}", file=sys.stderr, flush=True)
            if args.save is not None:
                with args.save.open("a") as file:
                    for outcome in played:
                        file.write(json.dumps({"mode": case.name, "delay": case.delay, **outcome}) + "\n")
            if not pieces[case] and outcomes[case]:
                results[case] = result_of(case, outcomes[case])
                print(json.dumps(results[case]), flush=True)
    return [results[case] for case in cases if case in results]


def take_core(cores: Any) -> None:
    """Give this process and its children a core of their own, if there are enough."""
    available = sorted(os.sched_getaffinity(0))
    number = cores.get()
    if number < len(available):
        os.sched_setaffinity(0, {available[number]})
        os.environ["OMP_NUM_THREADS"] = "1"


def play(work: Work) -> list[dict[str, Any]]:
    """Drive the episodes and return their outcomes."""
    if work.case.mode == DRIVER:
        numbers = range(work.first, work.first + work.episodes)
        return [play_driver(work.options.seed, number) for number in numbers]
    for attempt in range(ATTEMPTS):
        try:
            return play_once(work)
        except DemoError:
            if attempt == ATTEMPTS - 1:
                raise
    return []


def play_once(work: Work) -> list[dict[str, Any]]:
    """Start a node and an arena, and return the outcomes of the episodes."""
    parameters = {
        "seed": work.options.seed,
        "first_episode": work.first,
        "episodes": work.episodes,
        "execution": work.options.execution,
        "inference_delay": float(work.case.delay),
        "question": FIRST_COMMAND,
        "events": True,
    }
    with ExitStack() as stack:
        environment = ros_environment(stack.enter_context(own_domain()))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node_words = node_arguments(work.options)
        if work.case.horizon:
            node_words += ["-p", f"chunking_horizon:={work.case.horizon}"]
        node = Child("edgellm node", node_words, logs / "node.log", environment)
        stack.callback(node.stop)
        arguments = ["-m", ARENA_MODULE, *ros_arguments(parameters)]
        arena = Child("arena", arguments, logs / "arena.log", environment, pipe=True)
        stack.callback(arena.stop)
        return [event for event in world_events(arena, [node]) if event["event"] == "outcome"]


def result_of(case: Case, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the episodes of a case."""
    summary = summarise(outcomes, spoken=False)
    times = [outcome["time"] for outcome in outcomes if outcome["outcome"] == "success"]
    names = ("episodes", "successes", "collisions", "timeouts", "plans", "changes", "mean_speed", *JUMPS)
    return {
        "mode": case.name,
        "delay": case.delay,
        "time_to_target": statistics.fmean(times) if times else None,
        **{name: summary[name] for name in names},
        "failed": sorted(outcome["number"] for outcome in outcomes if outcome["outcome"] != "success"),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a table in Markdown.

    Jumps are means, with the 95th percentile in brackets.
    """

    def cell(value: dict[str, float | None]) -> str:
        return "" if value["mean"] is None else f"{value['mean']:.2f} ({value['p95']:.2f})"

    heads = (
        "delay",
        "mode",
        "at the target",
        "collisions",
        "time to target",
        "changes",
        *(name.replace("_", " ") for name in JUMPS),
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for result in results:
        seconds = result["time_to_target"]
        cells = [
            f"{result['delay']:g} s",
            result["mode"],
            f"{result['successes']} of {result['episodes']}",
            str(result["collisions"]),
            "" if seconds is None else f"{seconds:.1f} s",
            str(result["changes"]),
            *(cell(result[name]) for name in JUMPS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
