# SPDX-License-Identifier: Apache-2.0
"""What viewers get: markers, overlays, QoS of the user, and the topics of views/.

The camera of the overlays is calibrated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from edgellm_ros.msg import Generation
from edgellm_ros.srv import SetNoiseSeed
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo
from std_msgs.msg import String
from tf2_msgs.msg import TFMessage
from visualization_msgs.msg import Marker

from edgellm_arena.ros.camera_messages import camera_transform, to_camera_info
from edgellm_arena.world.camera import CAMERA
from edgellm_ros.ros.follower.node import FollowerNode

VIEWS = Path(__file__).parents[2] / "views"
RVIZ = yaml.safe_load((VIEWS / "edgellm.rviz").read_text())["Visualization Manager"]
PANELS = json.loads((VIEWS / "edgellm.foxglove.json").read_text())["configById"]
# of an RViz display
MESSAGES = {
    "rviz_default_plugins/MarkerArray": "visualization_msgs/msg/MarkerArray",
    "rviz_default_plugins/Path": "nav_msgs/msg/Path",
    "rviz_default_plugins/Image": "sensor_msgs/msg/Image",
}
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
OVERRIDES = {
    "/edgellm/text.publisher.reliability": "best_effort",  # of which the peer hears nothing then
    "/edgellm/markers.publisher.durability": "transient_local",
    "/edgellm/odom.subscription.reliability": "reliable",
}


@pytest.fixture(scope="module")
def node(start_node, peer, arena_engine):
    """The node, active, with overridden QoS of some topics."""
    child = start_node(
        engine_dir=arena_engine, autostart="true", max_input_age=3.0, plan_timeout=30.0,
        input_reliability="reliable", action_samples=3,
        **{"camera.pitch": CAMERA.pitch},  # the default is rounded
        **{f"qos_overrides.{name}": value for name, value in OVERRIDES.items()},
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture(autouse=True)
def fresh(node, peer):
    peer.clear()


def plan(peer, scene) -> SimpleNamespace:
    """One plan with a fixed seed: its paths, markers and overlay."""
    assert peer.call(SetNoiseSeed, "set_noise_seed", seed=1).success
    peer.clear()
    frame = peer.frame(scene.pixels)
    peer.command(scene.command)
    overlay = peer.wait(lambda: peer.received["overlay"], "overlay")[0]
    markers = peer.wait(lambda: peer.received["markers"], "markers")[0].markers
    generation = peer.wait(lambda: peer.received["generation"], "generation")[0]
    count = generation.action_chunk_count
    paths = peer.wait(lambda: len(peer.received["path"]) >= count and peer.received["path"], "paths")
    return SimpleNamespace(
        frame=frame, generation=generation, paths=list(paths), markers=markers, pixels=bytes(overlay.data)
    )


class TestMarkers:
    def test_are_the_paths_and_words_of_the_plan(self, peer, scene):
        made = plan(peer, scene)
        lines = [marker for marker in made.markers if marker.ns == "paths"]
        assert len(lines) == 3
        for line, path in zip(lines, made.paths, strict=True):
            assert line.points == [pose.pose.position for pose in path.poses]
            assert line.header == path.header
            assert (line.header.stamp, line.header.frame_id) == (made.frame.header.stamp, "base_link")
        (words,) = (marker for marker in made.markers if marker.ns == "words")
        assert words.text.replace("\n", " ") == made.generation.text

    def test_of_an_answer_without_trajectories_are_its_words_only(self, peer, scene):
        peer.set_parameter("action_samples", 0)
        try:
            peer.frame(scene.pixels)
            peer.command(scene.command)
            markers = peer.wait(lambda: peer.received["markers"], "markers")[0].markers
        finally:
            peer.set_parameter("action_samples", 3)
        assert [marker.action for marker in markers] == [Marker.DELETEALL, Marker.ADD]
        assert markers[1].ns == "words"

    def test_are_removed_when_the_node_is_deactivated(self, peer, scene):
        plan(peer, scene)
        peer.clear()
        assert peer.transition("deactivate")
        try:
            (array,) = peer.wait(lambda: peer.received["markers"], "markers")
            assert [marker.action for marker in array.markers] == [Marker.DELETEALL]
        finally:
            assert peer.transition("activate")
            peer.connect()


class TestCamera:
    """The frames of the peer have the frame_id camera."""

    @pytest.fixture
    def calibrate(self, peer) -> Iterator:
        """`calibrate(focal)` publishes the arena's camera with this focal length.

        The principal point is as in the parameters.
        """
        node = peer.node
        publisher = node.create_publisher(CameraInfo, "/edgellm/camera_info", 10)
        transforms = node.create_publisher(TFMessage, "/tf_static", LATCHED)
        transforms.publish(TFMessage(transforms=[camera_transform(CAMERA)]))

        def publish(focal: float, **changes: object) -> None:
            message = to_camera_info(0, CAMERA)
            message.k[0] = message.k[4] = focal
            message.k[2], message.k[5] = CAMERA.width / 2, CAMERA.height / 2
            for name, value in changes.items():
                setattr(message, name, value)
            found = publisher.get_subscription_count
            peer.wait(found, "subscription")
            publisher.publish(message)

        yield publish
        node.destroy_publisher(publisher)
        node.destroy_publisher(transforms)
        assert peer.transition("deactivate")  # the node forgets the camera
        assert peer.transition("activate")
        peer.connect()

    def sources(self, peer) -> tuple[str, str]:
        values = {pair.key: pair.value for pair in peer.status("inputs").values}
        return values["camera_intrinsics"], values["camera_pose"]

    def test_the_same_camera_from_parameters_and_from_topics_gives_the_same_overlay(
        self, peer, scene, calibrate
    ):
        peer.set_parameter("camera.source", "parameters")
        try:
            with_parameters = plan(peer, scene)
            assert self.sources(peer) == ("parameters", "parameters")
        finally:
            peer.set_parameter("camera.source", "auto")
        published = ("camera_info", "tf (base_link to camera)")

        def is_used() -> bool:
            calibrate(CAMERA.focal)
            return self.sources(peer) == published

        peer.wait(is_used, "camera from topics")
        with_topics = plan(peer, scene)
        for now, before in zip(with_topics.paths, with_parameters.paths, strict=True):
            assert [pose.pose for pose in now.poses] == [pose.pose for pose in before.poses]
        assert with_topics.pixels == with_parameters.pixels
        calibrate(0.8 * CAMERA.focal)
        peer.listen(0.3)
        assert plan(peer, scene).pixels != with_parameters.pixels

    def test_a_calibration_of_other_frames_is_not_used_and_warned_of(self, peer, scene, calibrate):
        peer.frame(scene.pixels)

        def is_reported() -> object:
            calibrate(CAMERA.focal, width=640, height=448)
            status = peer.status("inputs")
            return "camera_info" in status.message and status

        status = peer.wait(is_reported, "warning")
        assert "~/camera_info is not used: it is for frames of 640x448 pixels, the frames have 320x224" in (
            status.message
        )
        assert {pair.key: pair.value for pair in status.values}["camera_intrinsics"] == "parameters"

    def test_a_calibration_that_cannot_be_read_is_not_used_and_warned_of(self, peer, scene, calibrate):
        peer.frame(scene.pixels)
        publisher = peer.node.create_publisher(CameraInfo, "/edgellm/camera_info", 10)
        try:
            peer.wait(publisher.get_subscription_count, "subscription")

            def is_reported() -> object:
                publisher.publish(b"\0\1\0\0" + 40 * b"\xff")
                status = peer.status("inputs")
                return "~/camera_info is not used: failed to deserialize" in status.message and status

            status = peer.wait(is_reported, "warning")
        finally:
            peer.node.destroy_publisher(publisher)
        assert {pair.key: pair.value for pair in status.values}["camera_intrinsics"] == "parameters"

    def test_without_calibration_and_transforms_the_parameters_are_used(self, peer, scene):
        peer.frame(scene.pixels)
        without = ("parameters", "parameters (no static transforms from base_link to camera)")
        peer.wait(lambda: self.sources(peer) == without, "camera of the parameters")


class TestQos:
    def test_overrides_are_the_qos_of_their_topics(self, peer):
        (text,) = peer.node.get_publishers_info_by_topic("/edgellm/text")
        assert text.qos_profile.reliability == ReliabilityPolicy.BEST_EFFORT
        (markers,) = peer.node.get_publishers_info_by_topic("/edgellm/markers")
        assert markers.qos_profile.durability == DurabilityPolicy.TRANSIENT_LOCAL
        (odom,) = peer.node.get_subscriptions_info_by_topic("/edgellm/odom")
        assert odom.qos_profile.reliability == ReliabilityPolicy.RELIABLE

    def test_an_override_of_one_topic_leaves_the_others_alone(self, peer):
        for name in ("action_chunk", "generation", "path", "markers"):
            (publisher,) = peer.node.get_publishers_info_by_topic(f"/edgellm/{name}")
            assert publisher.qos_profile.reliability == ReliabilityPolicy.RELIABLE
        for name in ("action_chunk", "generation", "text", "overlay"):
            (publisher,) = peer.node.get_publishers_info_by_topic(f"/edgellm/{name}")
            assert publisher.qos_profile.durability == DurabilityPolicy.VOLATILE

    def test_every_topic_has_parameters_for_its_qos(self, peer):
        from rcl_interfaces.srv import ListParameters

        names = peer.call(ListParameters, "list_parameters", prefixes=["qos_overrides"]).result.names
        for topic in ("image", "odom", "command", "audio", "camera_info"):
            assert f"qos_overrides./edgellm/{topic}.subscription.depth" in names
        for topic in (
            "utterance", "generation", "text", "text_stream", "speech", "action_chunk", "path", "markers",
            "overlay",
        ):  # fmt: skip
            assert f"qos_overrides./edgellm/{topic}.publisher.reliability" in names
        assert "qos_overrides./tf_static.subscription.reliability" in names
        assert "qos_overrides./diagnostics.publisher.reliability" in names


class TestFiles:
    """What the files in views/ name, beside what both nodes offer."""

    @pytest.fixture
    def offered(self, node, peer) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Topics and services with their types."""
        follower = FollowerNode(context=peer.node.context)
        try:
            follower.trigger_configure()
            peer.wait(lambda: peer.node.count_publishers("/edgellm_follower/path"), "follower")
            return dict(peer.node.get_topic_names_and_types()), dict(peer.node.get_service_names_and_types())
        finally:
            follower.destroy_node()

    def test_of_rviz_have_the_types_of_their_displays(self, offered):
        displays = {each["Topic"]["Value"]: each for each in RVIZ["Displays"] if "Topic" in each}
        assert displays.keys() == {"/edgellm/markers", "/edgellm_follower/path", "/edgellm/overlay"}
        for topic, display in displays.items():
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
