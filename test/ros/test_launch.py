# SPDX-License-Identifier: Apache-2.0
"""Launch files and parameter files: the checks that need no installed ROS."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from edgellm_ros.ros.arm.parameters import SPECS as ARM_SPECS
from edgellm_ros.ros.follower.parameters import SPECS as FOLLOWER_SPECS
from edgellm_ros.ros.node.settings.parameters import SPECS
from edgellm_ros.ros.security.access import ARENA_REMAPPINGS, INTERFACES, REMAPPINGS

ROOT = Path(__file__).parents[2]
LAUNCH_FILES = sorted((ROOT / "launch").glob("*.launch.py"))
CONFIG_FILES = sorted((ROOT / "config").glob("*.yaml"))


def flat(values: dict, prefix: str = "") -> dict:
    names = {}
    for name, value in values.items():
        names |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return names


class Recorded:
    """Replaces any class of `launch` and `launch_ros`; stores its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kind, self.args, self.kwargs = type(self).__name__, args, kwargs


class AnyModule(ModuleType):
    """Replaces a module of `launch` or `launch_ros`; every name is a `Recorded`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Recorded,), {})


@pytest.fixture
def load(monkeypatch):
    """`load("demo")`: the launch file as a module.

    The module is loaded on stand-ins for `launch` and `launch_ros`.
    """
    for name in (
        "launch", "launch.actions", "launch.conditions", "launch.event_handlers", "launch.events",
        "launch.events.process", "launch.launch_description_sources", "launch.substitutions", "launch_ros",
        "launch_ros.actions", "launch_ros.parameter_descriptions", "launch_ros.substitutions",
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, AnyModule(name))

    def run(name: str) -> ModuleType:
        path = ROOT / "launch" / f"{name}.launch.py"
        spec = importlib.util.spec_from_file_location(f"{name}_launch", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return run


def entities(module: ModuleType, kind: str) -> list[Recorded]:
    """The entities of one class in a launch description."""
    (listed,) = module.generate_launch_description().args
    return [entity for entity in listed if entity.kind == kind]


@pytest.mark.parametrize("name", ["edgellm", "fleet", "demo", "follower", "arm", "remote", "replay", "view"])
def test_every_argument_of_a_launch_file_has_a_description(load, name):
    arguments = entities(load(name), "DeclareLaunchArgument")
    assert arguments
    assert all(argument.kwargs["description"].endswith(".") for argument in arguments)


def test_no_argument_reaches_the_node_past_the_demo(load):
    """If the demo passed on `image_topic:=/camera`, the node would be disconnected."""
    edgellm, follower = (
        dict(include.kwargs["launch_arguments"])
        for include in entities(load("demo"), "IncludeLaunchDescription")
    )
    for name, given in (("edgellm", edgellm), ("follower", follower)):
        declared = {argument.args[0] for argument in entities(load(name), "DeclareLaunchArgument")}
        assert given.keys() == declared
    assert follower["view"] == "none"  # one view for both
    for name in ("image", "camera_info", "odom", "joint_states", "command", "audio"):
        assert edgellm[f"{name}_topic"] == f"~/{name}"
    assert follower["action_chunk_topic"] == "edgellm/action_chunk"  # what the node publishes to
    assert follower["odom_topic"] == "edgellm/odom"


@pytest.mark.parametrize(
    "given, changed",
    [({}, {}), ({"rate": "10", "stamped": "true"}, {"rate": 10.0, "stamped": True})],
)
def test_arguments_of_the_follower_override_its_file_only_where_they_are_given(load, given, changed):
    module = load("follower")
    declared = entities(module, "DeclareLaunchArgument")
    values = {argument.args[0]: argument.kwargs["default_value"] for argument in declared} | given
    module.LaunchConfiguration = lambda name: SimpleNamespace(perform=lambda context: values[name])
    (node,) = module._start_node(None)
    assert node.kwargs["parameters"][1] == {"autostart": True, "use_sim_time": False, **changed}
    assert ("~/action_chunk", "edgellm/action_chunk") in node.kwargs["remappings"]


@pytest.mark.parametrize(("given", "dry_run"), [("", {}), ("false", {"dry_run": False})])
def test_the_arm_moves_only_where_the_file_or_an_argument_says_so(load, given, dry_run):
    module = load("arm")
    declared = entities(module, "DeclareLaunchArgument")
    values = {argument.args[0]: argument.kwargs.get("default_value", "/arm.yaml") for argument in declared}
    values["dry_run"] = given
    module.LaunchConfiguration = lambda name: SimpleNamespace(perform=lambda context: values[name])
    (node,) = module._start_node(None)
    expected = {"autostart": True, "use_sim_time": False, "contract": "/arm.yaml", **dry_run}
    assert node.kwargs["parameters"][1] == expected
    assert yaml.safe_load((ROOT / "config" / "arm.yaml").read_text())["/**"]["ros__parameters"]["dry_run"]


def started(load, **given: str) -> Recorded:
    """The node that edgellm.launch.py starts with these arguments."""
    module = load("edgellm")
    declared = entities(module, "DeclareLaunchArgument")
    values = {argument.args[0]: argument.kwargs["default_value"] for argument in declared} | given
    module.LaunchConfiguration = lambda name: SimpleNamespace(perform=lambda context: values[name])
    (node,) = module._start_node(None)
    return node


def test_the_cameras_of_a_policy_get_their_topics(load):
    node = started(
        load, image_topic="/top/image_raw", camera_topics="wrist:=/wrist/image_raw left.arm:=/left/image_raw"
    )
    found = dict(node.kwargs["remappings"])
    assert found["~/image"] == "/top/image_raw"
    assert found["~/wrist/image"] == "/wrist/image_raw"
    assert found["~/left_arm/image"] == "/left/image_raw"


@pytest.mark.parametrize(("given", "port"), [("", None), ("0", "0"), ("8000", "8000")])
def test_the_port_of_openai_s_api_overrides_the_file_where_it_is_given(load, given, port):
    value = started(load, serve_port=given).kwargs["parameters"][1].get("serve_port")
    assert (value and value.args[0]) == port
    assert value is None or value.kwargs == {"value_type": int}


@pytest.mark.parametrize("given", ["wrist", "wrist:=", ":=/wrist/image_raw", "wrist:= /wrist/image_raw"])
def test_topics_of_cameras_in_another_form_are_refused(load, given):
    with pytest.raises(ValueError, match="camera_topics must be NAME:=TOPIC separated by spaces, got"):
        started(load, camera_topics=given)


def test_a_fleet_is_one_process_with_the_namespaces(load):
    module = load("fleet")
    declared = entities(module, "DeclareLaunchArgument")
    values = {argument.args[0]: argument.kwargs.get("default_value", "") for argument in declared}
    values |= {"namespaces": "robot1 robot2", "image_topic": "camera/image_raw", "device": "cuda"}
    module.LaunchConfiguration = lambda name: SimpleNamespace(perform=lambda context: values[name])
    (process,) = module._start_nodes(None)
    assert process.kwargs["executable"] == "edgellm_fleet"
    assert process.kwargs["arguments"] == ["robot1", "robot2", "--ros-args", "--log-level", "info"]
    assert "namespace" not in process.kwargs  # it would be that of all nodes
    assert dict(process.kwargs["remappings"])["~/image"] == "camera/image_raw"
    given = process.kwargs["parameters"][1]
    assert given.keys() == {"autostart", "use_sim_time", "device"}
    assert given["device"].args == ("cuda",)


@pytest.mark.parametrize("name", ["edgellm", "follower", "arm"])
@pytest.mark.parametrize("enclave, given", [("", []), ("/robot/brain", ["--enclave", "/robot/brain"])])
def test_the_node_gets_the_enclave_that_is_given(load, name, enclave, given):
    module = load(name)
    declared = entities(module, "DeclareLaunchArgument")
    values = {argument.args[0]: argument.kwargs.get("default_value", "") for argument in declared}
    values["enclave"] = enclave
    module.LaunchConfiguration = lambda name: SimpleNamespace(perform=lambda context: values[name])
    (node,) = module._start_node(None)
    assert node.kwargs["arguments"] == ["--ros-args", "--log-level", "info", *given]


def test_the_policy_has_the_topics_of_the_launch_files(load):
    """Those that differ from the nodes' own names."""
    nodes = ("follower", "arm", "play")
    renamed = {
        (f"edgellm_{node}", f"~/{name}"): new
        for node in nodes
        for name, (new, _) in load(node).TOPICS.items()
        if new != f"~/{name}"
    }
    assert renamed == REMAPPINGS
    demo = load("demo").FOLLOWER_TOPICS
    renamed = {name: new for name, new in demo.items() if new != f"~/{name.removesuffix('_topic')}"}
    assert {f"{name.removeprefix('~/')}_topic": new for (_, name), new in ARENA_REMAPPINGS.items()} == renamed


class TestRemote:
    """What remote.launch.py starts on each computer."""

    @pytest.fixture
    def start(self, load):
        """`start(machine="gpu", ...)`: environment, launch file, and what it is given."""
        module = load("remote")
        declared = entities(module, "DeclareLaunchArgument")

        def run(**given: str) -> tuple[dict[str, str], str, dict[str, str]]:
            values = {
                argument.args[0]: argument.kwargs.get("default_value", "") for argument in declared
            } | given
            module.LaunchConfiguration = lambda name: SimpleNamespace(perform=lambda context: values[name])
            *variables, include = module._start(SimpleNamespace(launch_configurations=given))
            (path,) = include.args[0].args[0].args
            return (
                {each.args[0]: each.args[1] for each in variables},
                path[2],
                dict(include.kwargs["launch_arguments"]),
            )

        return run

    @pytest.mark.parametrize(
        ("given", "file", "arguments"),
        [
            ({"machine": "gpu"}, "edgellm", {"joint_states_topic": "edgellm_arm/state"}),
            (
                {"machine": "gpu", "joint_states_topic": "/joints"},
                "edgellm",
                {"joint_states_topic": "/joints"},
            ),
            ({"machine": "gpu", "drive": "follower"}, "edgellm", {}),
            ({"machine": "robot", "contract": "/arm.yaml"}, "arm", {"contract": "/arm.yaml"}),
            ({"machine": "robot", "drive": "follower"}, "follower", {}),
        ],
    )
    def test_each_computer_starts_its_node(self, start, given, file, arguments):
        assert start(**given) == ({}, f"{file}.launch.py", arguments)

    def test_peers_replace_discovery_by_multicast(self, start):
        environment, _, _ = start(machine="gpu", peers="192.168.1.10;192.168.1.11", domain_id="7")
        assert environment == {
            "ROS_STATIC_PEERS": "192.168.1.10;192.168.1.11",
            "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
            "ROS_DOMAIN_ID": "7",
        }

    def test_an_arm_needs_its_contract(self, start):
        with pytest.raises(ValueError, match="contract is missing: machine:=robot drive:=arm needs the file"):
            start(machine="robot")

    def test_its_topic_of_joint_states_is_that_of_the_arm(self, load):
        node, name = load("remote").STATE_TOPIC.split("/")
        assert any((each.node, each.name) == (node, f"~/{name}") for each in INTERFACES)


class TestView:
    """What view.launch.py starts."""

    @pytest.fixture
    def start(self, load, monkeypatch):
        """`start("rviz", installed=True, namespace=...)`: the entities for the viewer."""
        module = load("view")
        module.get_package_share_directory = lambda package: str(ROOT)

        def run(view: str, installed: bool, **given: str) -> list[Recorded]:
            values = {"view": view, "namespace": "", "frame_id": "base_link", "use_sim_time": "false"} | given
            module.LaunchConfiguration = lambda name: SimpleNamespace(perform=lambda context: values[name])

            def prefix(package: str) -> str:
                if not installed:
                    raise module.PackageNotFoundError(package)
                return "/opt/ros"

            module.get_package_prefix = prefix
            return module._start_view(None)

        return run

    def test_rviz_shows_our_file(self, start):
        (rviz,) = start("rviz", True, use_sim_time="true")
        assert (rviz.kwargs["package"], rviz.kwargs["executable"]) == ("rviz2", "rviz2")
        assert rviz.kwargs["arguments"] == ["-d", str(ROOT / "views" / "edgellm.rviz")]
        assert rviz.kwargs["parameters"] == [{"use_sim_time": True}]

    def test_foxglove_gets_a_bridge_and_the_user_the_path_of_the_layout(self, start):
        bridge, message = start("foxglove", True)
        assert bridge.kwargs["package"] == "foxglove_bridge"
        assert str(ROOT / "views" / "edgellm.foxglove.json") in message.kwargs["msg"]

    @pytest.mark.parametrize("view, package", [("rviz", "rviz2"), ("foxglove", "foxglove_bridge")])
    def test_a_viewer_that_is_not_installed_is_one_line(self, start, view, package):
        (message,) = start(view, False)
        assert message.kind == "LogInfo"
        assert f"the ROS package {package} is not installed" in message.kwargs["msg"]

    def test_none_starts_nothing(self, start):
        assert start("none", True) == []

    def test_topics_and_frame_are_those_of_the_namespace(self, start):
        (rviz,) = start("rviz", True, namespace="/robot_1", frame_id="robot_1/base")
        text = Path(rviz.kwargs["arguments"][1]).read_text()
        config = yaml.safe_load(text)["Visualization Manager"]
        assert config["Global Options"]["Fixed Frame"] == "robot_1/base"
        topics = [display["Topic"]["Value"] for display in config["Displays"] if "Topic" in display]
        names = ("edgellm/markers", "edgellm_follower/path", "edgellm/overlay")
        assert topics == [f"/robot_1/{name}" for name in names]


@pytest.mark.parametrize("name", ["demo", "replay"])
class TestEndOfALaunch:
    """What a launch file makes of the end of its main process."""

    def end(self, module: ModuleType, returncode: int, is_shutdown: bool) -> Any:
        return module._end(SimpleNamespace(returncode=returncode), SimpleNamespace(is_shutdown=is_shutdown))

    def test_success_shuts_the_launch_down(self, load, name):
        assert self.end(load(name), 0, False).kwargs["event"].kind == "Shutdown"

    def test_failure_is_the_launchs_failure(self, load, name):
        with pytest.raises(RuntimeError, match="ended with exit code 1"):
            self.end(load(name), 1, False)

    @pytest.mark.parametrize("returncode", [0, 130, -2])
    def test_after_ctrl_c_the_launch_is_not_shut_down_a_second_time(self, load, name, returncode):
        assert self.end(load(name), returncode, True) is None


@pytest.mark.skipif(importlib.util.find_spec("launch_ros") is None, reason="ROS's launch is not installed")
@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_every_launch_argument_is_described(path):
    from launch.launch_description_sources import get_launch_description_from_python_launch_file

    description = get_launch_description_from_python_launch_file(str(path))
    arguments = description.get_launch_arguments()
    assert arguments
    assert all(argument.description for argument in arguments)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.name)
def test_parameter_files_name_parameters_of_the_node_with_values_of_their_type(path):
    specs = {"follower": FOLLOWER_SPECS, "arm": ARM_SPECS}.get(path.stem, SPECS)
    for node in yaml.safe_load(path.read_text()).values():
        for name, value in flat(node["ros__parameters"]).items():
            if name == "use_sim_time":
                continue
            assert type(value) is type(specs[name].default), name
