# SPDX-License-Identifier: Apache-2.0
"""Plays a bag into the live node, records its outputs and compares them.

bag --> ReplayLink (here) == /clock, inputs ==> edgellm node (its own process)
             |        <== outputs ============
             +--> output bag --> compared with the expected one
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_ros.engine.device import open_device
from edgellm_ros.engine_directory.adapters.adapter_folder import FOLDER, find_adapters
from edgellm_ros.engine_directory.adapters.adapter_source import find_source
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import list_files, sha256
from edgellm_ros.replay.bag import Bag
from edgellm_ros.replay.comparison import Comparison, compare, read_output_bag
from edgellm_ros.replay.inputs import COMPRESSED, JOINT_STATES, find_inputs
from edgellm_ros.replay.recording import Recording, refuse_existing
from edgellm_ros.ros.camera_topic import camera_names, camera_topic
from edgellm_ros.ros.node.settings.loras import parse_loras
from edgellm_ros.ros.processes import (
    NODE_MODULE,
    Child,
    held_back_signals,
    own_domain,
    require_ros,
    ros_arguments,
    ros_environment,
    terminated_as_interrupted,
)
from edgellm_ros.ros.replay.parameters_file import cameras_in, check_parameters_file, sets_parameter

START_S = 600.0  # to load the engines; a dead node is noticed at once
CONNECT_S = 60.0  # until all topics are connected
LONGEST_PLAN_S = 3600.0  # the parameter's maximum: no plan may time out on a slow computer
BAD_PARAMETERS = 2  # the node's exit code


class ReplayError(RuntimeError):
    """An error of a replay that could not be finished, with the end of the node's log."""


@dataclass(frozen=True)
class ReplayOptions:
    """The bag to play, the engine, and the comparison."""

    bag: Path
    out: Path  # bag to write
    engine_dir: Path
    device: str
    remappings: Mapping[str, str]  # topic of the bag -> input of the node
    expect: Path | None = None  # output bag to compare with
    tolerance: float = 1e-3  # of numbers in actions and paths
    noise_seed: int | None = None  # None: the node's parameter
    params: Path | None = None  # YAML file of the node's parameters
    lora: str = ""  # NAME or NAME=PATH, base = the base model, empty = the node's parameter
    storage: str = "mcap"
    overlay: bool = False  # record ~/overlay
    standing: bool = False  # the bag needs no odometry: the robot stands still
    cameras: tuple[str, ...] = ()  # for a policy, as the node's parameter; () = as in `params`, or all


@dataclass(frozen=True)
class ReplayResult:
    """Counts of a replay, and the comparison of its outputs."""

    inputs: dict[str, int]  # messages by topic
    became: dict[str, int]  # effects of the inputs, by the node's counters
    outputs: dict[str, int]  # messages by topic
    comparison: Comparison | None  # None: nothing was expected

    def report(self, out: str) -> str:
        """Describe the inputs, their effects, and the outputs.

        `out`: name of the output bag.
        """
        lines = [
            "played     " + _listing({f"~/{name}": count for name, count in self.inputs.items()}),
            "became     " + (_listing(self.became) or "nothing"),
            f"recorded   {_listing({f'~/{name}': n for name, n in self.outputs.items()})} in {out}",
        ]
        return "\n".join(lines)


class Replay:
    """A replay whose engine, bag, expected bag and output path have been checked."""

    def __init__(self, options: ReplayOptions) -> None:
        """Check the options.

        Raises FileNotFoundError, FileExistsError or ValueError for an unusable engine, bag or output path.
        """
        self.options = options
        refuse_existing(options.out)
        self._config = EngineConfig.load(options.engine_dir)
        policy = self._config.policy
        cameras = options.cameras
        if policy is not None and options.params is not None and not any(cameras):
            cameras = cameras_in(options.params)
        # A policy's cameras that the robot has, the first on ~/image.
        self.cameras = camera_names(cameras, policy)
        further = [camera_topic(name).removeprefix("~/") for name in self.cameras[1:]]
        self._expected = read_output_bag(options.expect) if options.expect is not None else None
        self._bag = Bag(options.bag)
        try:
            self.inputs = find_inputs(
                self._bag,
                options.remappings,
                needs_image=self._config.vision is not None or policy is not None,
                needs_odometry=self._config.expert is not None and not options.standing,
                hears=self._config.audio is not None,
                of_policy=[*further, JOINT_STATES] if policy is not None else [],
            )
            self.inputs.check()
        except BaseException:
            self._bag.close()
            raise

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bag.close()

    @property
    def node_parameters(self) -> dict[str, Any]:
        """Return the parameters with which the node gives equal outputs on every computer."""
        compressed = self.inputs.types.get("image") == COMPRESSED
        parameters = {
            "engine_dir": str(self.options.engine_dir.resolve()),
            "device": self.options.device,
            "autostart": True,
            "use_sim_time": True,
            "image_transport": "compressed" if compressed else "raw",
            "audio_transport": "chunk",
            "input_reliability": "reliable",
            "plan_timeout": LONGEST_PLAN_S,
            "odom_wait": 0.0,  # no input is sent while a plan waits
            "prefix_cache_file": "",  # independent of earlier runs
        }
        if self.cameras:
            parameters["cameras"] = list(self.cameras)
        if self.options.noise_seed is not None:
            parameters["noise_seed"] = self.options.noise_seed
        if self.options.lora:
            name, equals, _ = self.options.lora.partition("=")
            parameters["lora"] = name
            if equals:
                directory = parse_loras([self.options.lora])[name].resolve()
                parameters["loras"] = [f"{name}={directory}"]
        return parameters

    @property
    def start_parameters(self) -> dict[str, Any]:
        """Return the parameters of a node that is started for the replay.

        Without a value in the file of parameters, nothing is drafted: drafts are paused by measured times,
        which changes numbers by rounding.
        """
        file = self.options.params
        drafting = {} if file is not None and sets_parameter(file, "drafting") else {"drafting": "off"}
        return {**self.node_parameters, **drafting}

    def play(self, link: Any, status: Callable[[str], None]) -> ReplayResult:
        """Play the whole bag through a `ReplayLink`, write the outputs, and compare them.

        `status` is called once the node has accepted all parameters.
        """
        options = self.options
        link.wait_until_active(START_S)
        parameters = self.node_parameters
        # Start values, which services may have changed.
        changed = {name: parameters.pop(name) for name in ("lora", "noise_seed") if name in parameters}
        cameras = parameters.pop("cameras", None)
        link.check_parameters(parameters)
        if cameras is not None:  # a node without names has all of the policy's
            (found,) = link.parameters("cameras")
            if list(camera_names(found, self._config.policy)) != cameras:
                link.check_parameters({"cameras": cameras})
        link.wait_until_connected(CONNECT_S)
        if "lora" in changed:
            link.check_lora(changed["lora"])
        if "noise_seed" in changed:
            link.set_noise_seed(changed["noise_seed"])
        engine = self._hashes(link)
        became: Counter[str] = Counter()
        status(f"playing {len(self.inputs)} messages of {options.bag} ...")
        with Recording(options.out, options.storage, engine, options.overlay) as recording:
            for message in self.inputs:
                answer = link.play(message)
                recording.add(message, answer.outputs, answer.became)
                became.update(answer.became)
        comparison = None
        if self._expected is not None:
            comparison = compare(self._expected, read_output_bag(options.out), options.tolerance)
        counts = {name: topic.count for name, topic in self.inputs.topics.items()}
        return ReplayResult(counts, dict(became), dict(recording.counts), comparison)

    def _hashes(self, link: Any) -> dict[str, str]:
        """Return the SHA-256 of the files of the engine and of the active adapter."""
        root = self.options.engine_dir
        files = list_files(root, [entry.path for entry in self._config.files])
        hashes = {entry.path: entry.sha256 for entry in files}
        if name := link.active_lora():
            (loras,) = link.parameters("loras")
            source = find_source(parse_loras(loras).get(name) or find_adapters(root)[name])
            hashes |= {f"{FOLDER}/{name}/{file}": sha256(path) for file, path in source.files.items()}
        return hashes


def run_replay(options: ReplayOptions, status: Callable[[str], None]) -> ReplayResult:
    """Check everything, start the node in a ROS domain of its own, and play.

    Raises ImportError without ROS 2, EngineError for a device that is not available, ValueError or OSError
    for unusable options or files, ReplayError if the node fails.
    """
    require_ros("a replay")
    open_device(options.device)
    with ExitStack() as stack:
        stack.enter_context(terminated_as_interrupted())
        replay = stack.enter_context(Replay(options))
        domain = stack.enter_context(own_domain())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = ros_arguments(replay.start_parameters)
        if options.params is not None:
            # Before the replay's own parameters, which then take precedence.
            arguments[1:1] = ["--params-file", str(check_parameters_file(options.params))]
        log = folder / "edgellm_node.log"
        node = Child("edgellm node", ["-m", NODE_MODULE, *arguments], log, ros_environment(domain))
        stack.callback(node.stop)
        return _play_to(node, replay, domain, status)


def _play_to(node: Child, replay: Replay, domain: int, status: Callable[[str], None]) -> ReplayResult:
    import rclpy

    from edgellm_ros.ros.replay.replay_link import LinkError, ReplayLink

    def check_alive() -> None:
        check_interrupted()
        code = node.process.poll()
        if code == BAD_PARAMETERS:
            raise ValueError(node.log_tail(1).removeprefix("edgellm_node: error: "))
        if code is not None:
            raise LinkError(f"the edgellm node ended with exit code {code}")

    with ExitStack() as stack:
        check_interrupted = stack.enter_context(held_back_signals())
        stack.enter_context(_local_discovery())
        context = rclpy.Context()
        # No arguments: rcl would read the command's own `--remap FROM:=TO` as a remapping rule.
        rclpy.init(args=[], context=context, domain_id=domain)
        stack.callback(rclpy.try_shutdown, context=context)
        link = ReplayLink(replay.inputs.types, replay.options.overlay, context, check_alive)
        stack.callback(link.destroy_node)
        try:
            return replay.play(link, status)
        except LinkError as error:
            _, problem, reason = node.log_tail().rpartition("cannot load the engines: ")
            if problem:
                raise ValueError(reason.splitlines()[0]) from error
            raise ReplayError(f"{error}; the end of the node's log:\n{node.log_tail()}") from error


def attach_replay(options: ReplayOptions, status: Callable[[str], None]) -> ReplayResult:
    """Play into the edgellm node that already runs in this process's ROS domain.

    The node must have the parameters of `Replay.node_parameters`; otherwise ReplayError is raised.
    """
    require_ros("a replay")
    import rclpy

    from edgellm_ros.ros.replay.replay_link import LinkError, ReplayLink

    with ExitStack() as stack:
        replay = stack.enter_context(Replay(options))
        if not rclpy.ok():
            rclpy.init(args=[])
            stack.callback(rclpy.try_shutdown)
        link = ReplayLink(replay.inputs.types, options.overlay)
        stack.callback(link.destroy_node)
        try:
            return replay.play(link, status)
        except LinkError as error:
            raise ReplayError(str(error)) from error


def _listing(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


@contextmanager
def _local_discovery() -> Iterator[None]:
    """Make rclpy of this process discover this computer only, as the node does."""
    name = "ROS_AUTOMATIC_DISCOVERY_RANGE"
    before = os.environ.get(name)
    os.environ[name] = "LOCALHOST"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
