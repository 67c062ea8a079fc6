# SPDX-License-Identifier: Apache-2.0
"""The RViz configuration and the Foxglove layout: complete, and of the topics that the nodes offer."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from edgellm_ros.msg import Generation
from std_msgs.msg import String

from edgellm_ros.ros.follower.node import FollowerNode

VIEWS = Path(__file__).parents[2] / "views"
RVIZ = yaml.safe_load((VIEWS / "edgellm.rviz").read_text())["Visualization Manager"]
LAYOUT = json.loads((VIEWS / "edgellm.foxglove.json").read_text())
PANELS = LAYOUT["configById"]
# of an RViz display
MESSAGES = {
    "rviz_default_plugins/MarkerArray": "visualization_msgs/msg/MarkerArray",
    "rviz_default_plugins/Path": "nav_msgs/msg/Path",
    "rviz_default_plugins/Image": "sensor_msgs/msg/Image",
}
TITLE = "foxglovePanelTitle"  # the app's, beside the panel's own settings


def displays() -> dict[str, dict]:
    """The RViz displays of topics, by topic."""
    return {display["Topic"]["Value"]: display for display in RVIZ["Displays"] if "Topic" in display}


class TestLayout:
    def test_every_panel_has_one_place(self):
        def leaves(node: Any) -> Iterator[str]:
            if isinstance(node, str):
                yield node
            else:
                assert node["direction"] in ("row", "column")
                assert 0 < node["splitPercentage"] < 100
                yield from leaves(node["first"])
                yield from leaves(node["second"])

        assert sorted(leaves(LAYOUT["layout"])) == sorted(PANELS)

    def test_settings_are_those_of_foxgloves_sdk(self):
        sdk = pytest.importorskip("foxglove.layouts")
        kinds = {
            "3D": sdk.ThreeDeeConfig,
            "Image": sdk.ImageConfig,
            "Plot": sdk.PlotConfig,
            "RawMessages": sdk.RawMessagesConfig,
            "DiagnosticSummary": sdk.DiagnosticsSummaryConfig,
            "Publish": sdk.PublishConfig,
            "CallService": sdk.ServiceCallConfig,
        }
        for panel, settings in PANELS.items():
            given = {name: value for name, value in settings.items() if name != TITLE}
            assert problem(given, kinds[panel.split("!")[0]], panel) == ""


def problem(value: Any, kind: Any, where: str) -> str:
    """Return why a value of the layout is not of the SDK's type; empty if it is."""
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    wrong = f"{where}: {value!r} is not {kind}"
    if origin in (types.UnionType, typing.Union):
        reasons = [problem(value, option, where) for option in arguments]
        return "" if "" in reasons else max(reasons, key=len)
    if origin is typing.Literal:
        return "" if value in arguments else wrong
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        # the SDK writes layerId itself
        hints = {camel(name): hint for name, hint in typing.get_type_hints(kind).items()} | {"layerId": str}
        parts = [(value[name], hints.get(name), f"{where}.{name}") for name in value]
        if any(hint is None for _, hint, _ in parts):
            return f"{where} has no {sorted(value.keys() - hints.keys())}"
    elif origin is dict and isinstance(value, dict):
        parts = [(value[name], arguments[1], f"{where}.{name}") for name in value]
    elif origin is list and isinstance(value, list):
        parts = [(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value)]
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        parts = [(item, arguments[index], f"{where}[{index}]") for index, item in enumerate(value)]
    elif kind in (bool, str, float, int):
        right = type(value) in ((int, float) if kind is float else (kind,))
        return "" if right else wrong
    else:
        return wrong
    return next(filter(None, (problem(*part) for part in parts)), "")


def camel(name: str) -> str:
    return re.sub("_(.)", lambda match: match[1].upper(), name)


@pytest.fixture(scope="module")
def offered(start_node, peer, arena_engine) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Topics and services of both nodes, with their types."""
    start_node(engine_dir=arena_engine, autostart="true")
    follower = FollowerNode(context=peer.node.context)
    try:
        follower.trigger_configure()
        follower.trigger_activate()
        peer.connect()
        peer.wait(lambda: peer.node.count_publishers("/edgellm_follower/path"), "follower")
        return dict(peer.node.get_topic_names_and_types()), dict(peer.node.get_service_names_and_types())
    finally:
        follower.destroy_node()


class TestTopics:
    """What the files name, beside what the nodes offer."""

    def test_of_rviz_have_the_types_of_their_displays(self, offered):
        assert displays().keys() == {"/edgellm/markers", "/edgellm_follower/path", "/edgellm/overlay"}
        for topic, display in displays().items():
            assert offered[0][topic] == [MESSAGES[display["Class"]]]

    def test_of_foxglove_have_the_types_of_their_panels(self, offered):
        topics, services = offered
        assert topics[PANELS["Image!camera"]["imageMode"]["imageTopic"]] == ["sensor_msgs/msg/Image"]
        shown = PANELS["3D!plan"]["topics"]
        assert [topics[topic] for topic in shown] == [
            ["visualization_msgs/msg/MarkerArray"], ["nav_msgs/msg/Path"]
        ]  # fmt: skip
        publish = PANELS["Publish!command"]
        assert topics[publish["topicName"]] == [publish["datatype"]]
        assert json.loads(publish["value"]).keys() == {"data"}
        state = PANELS["DiagnosticSummary!state"]["topicToRender"]
        assert topics[state] == ["diagnostic_msgs/msg/DiagnosticArray"]
        for panel in ("CallService!stop", "CallService!resume"):
            assert services[PANELS[panel]["serviceName"]] == ["std_srvs/srv/Trigger"]

    def test_of_plots_and_texts_have_the_fields(self, offered):
        kinds = {"edgellm_ros/msg/Generation": Generation, "std_msgs/msg/String": String}
        plots = [series["value"] for series in PANELS["Plot!latencies"]["paths"]]
        for path in (*plots, PANELS["RawMessages!words"]["topicPath"]):
            topic, field = path.rsplit(".", 1)
            (kind,) = offered[0][topic]
            expected = "double" if path in plots else "string"
            assert kinds[kind].get_fields_and_field_types()[field] == expected
        latencies = {name for name in Generation.get_fields_and_field_types() if name.endswith("_latency")}
        assert {path.rsplit(".", 1)[1] for path in plots} == latencies
