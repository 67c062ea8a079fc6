# SPDX-License-Identifier: Apache-2.0
"""What of a bag the node gets to hear, and bags that lack what it needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.replay.bag import Bag, BagError
from edgellm_ros.replay.inputs import (
    COMPRESSED,
    InputMessage,
    find_inputs,
    frames_last,
    parse_remappings,
)
from fixtures.made_bags import (
    ARENA,
    copy_bag,
    header,
    joint_state,
    make,
    raw_image,
    string,
    write_bag,
)

STRING = "std_msgs/msg/String"
COMMAND = ("/edgellm/command", STRING, 6, string("go"))
RAW = "sensor_msgs/msg/Image"
OF_POLICY = ("wrist/image", "joint_states")


def inputs_of(path: Path, **options) -> list[InputMessage]:
    needs = {"remappings": {}, "needs_image": True, "needs_odometry": True, "hears": False} | options
    with Bag(path) as bag:
        return list(find_inputs(bag, **needs))


def arm_bag(path: Path, wrist: str = RAW, rename: dict[str, str] | None = None) -> Path:
    """A bag of a robot with an arm: two cameras, joint states, a command."""
    frame = raw_image(1, np.zeros((1, 1, 3), np.uint8))
    other = make(COMPRESSED, header=header(1), format="jpeg", data=np.zeros(1, np.uint8))
    messages = [
        ("/edgellm/joint_states", "sensor_msgs/msg/JointState", 3, joint_state(1, {"a": 1.0})),
        ("/edgellm/wrist/image", wrist, 4, other if wrist == COMPRESSED else frame),
        ("/edgellm/image", RAW, 5, frame),
        COMMAND,
    ]
    return write_bag(path, [((rename or {}).get(topic, topic), *rest) for topic, *rest in messages])


def inputs_of_policy(path: Path, **options) -> list[str]:
    return [m.name for m in inputs_of(path, needs_odometry=False, of_policy=OF_POLICY, **options)]


def without(path: Path, *names: str) -> Path:
    return copy_bag(path, keep=lambda message: message.topic.name.removeprefix("/edgellm/") not in names)


def test_the_arena_topics_are_played_by_default():
    assert {(m.name, m.type) for m in inputs_of(ARENA)} == {
        ("image", "sensor_msgs/msg/CompressedImage"),
        ("odom", "nav_msgs/msg/Odometry"),
        ("command", STRING),
        ("audio", "edgellm_ros/msg/AudioChunk"),
    }


def test_messages_come_in_the_order_of_the_bag_with_their_own_stamps():
    messages = inputs_of(ARENA)
    assert [m.clock for m in messages] == sorted(m.clock for m in messages)
    sound = next(m for m in messages if m.name == "audio")
    assert sound.stamp < sound.clock  # its first sample was taken before it was sent
    command = next(m for m in messages if m.name == "command")
    assert command.stamp == command.clock  # it has none of its own


def test_other_topics_are_played_where_they_are_remapped(tmp_path):
    bag = copy_bag(tmp_path / "bag", rename={"/edgellm/image": "/camera/image_raw/compressed"})
    remappings = parse_remappings(["/camera/image_raw/compressed:=~/image"])
    played = inputs_of(bag, remappings=remappings)
    assert [(m.name, m.data) for m in played] == [(m.name, m.data) for m in inputs_of(ARENA)]


def test_a_remapped_topic_replaces_the_one_of_the_default_name(tmp_path):
    messages = [("/edgellm/command", STRING, 1, string("a")), ("/other", STRING, 2, string("b"))]
    bag = write_bag(tmp_path / "bag", messages)
    played = inputs_of(bag, remappings={"/other": "command"}, needs_image=False, needs_odometry=False)
    assert [m.clock for m in played] == [2]


@pytest.mark.parametrize("target", ["~/odom", "odom", "/edgellm/odom"])
def test_remappings_name_inputs_in_three_ways(target):
    assert parse_remappings([f"/a/b:={target}"]) == {"/a/b": "odom"}


@pytest.mark.parametrize("text", ["", "/a", "/a:=", "/a:=~/pose", "a:=~/image", "/a:=/image"])
def test_a_remapping_that_is_none(text):
    with pytest.raises(ValueError, match="expected /TOPIC:=TO"):
        parse_remappings([text])


@pytest.mark.parametrize("texts", [["/a:=image", "/b:=image"], ["/a:=image", "/a:=odom"]])
def test_remappings_that_contradict_each_other(texts):
    with pytest.raises(ValueError, match="contradicts"):
        parse_remappings(texts)


def test_a_remapping_of_a_topic_that_is_not_there(tmp_path):
    with pytest.raises(BagError, match=r"no topic /nowhere to remap to ~/image; the bag has /edgellm/audio"):
        inputs_of(ARENA, remappings={"/nowhere": "image"})


@pytest.mark.parametrize("name", ["image", "odom", "command"])
def test_a_topic_that_the_node_needs_is_missing(tmp_path, name):
    bag = without(tmp_path / "bag", name)
    with pytest.raises(BagError, match=rf"no messages for ~/{name} \(/edgellm/{name}\)"):
        inputs_of(bag)


def test_sound_takes_the_place_of_commands_for_a_model_that_hears(tmp_path):
    bag = without(tmp_path / "bag", "command")
    assert "audio" in {m.name for m in inputs_of(bag, hears=True)}
    with pytest.raises(BagError, match=r"no messages for ~/command \(.*\) or ~/audio \(.*\)"):
        inputs_of(without(tmp_path / "silent", "command", "audio"), hears=True)


def test_what_the_model_does_not_need_may_be_missing(tmp_path):
    bag = without(tmp_path / "bag", "image", "odom")
    assert {m.name for m in inputs_of(bag, needs_image=False, needs_odometry=False)} == {"command", "audio"}


class TestPolicy:
    def test_takes_joint_states_and_the_frames_of_all_cameras(self, tmp_path):
        played = inputs_of_policy(arm_bag(tmp_path / "bag"))
        assert played == ["joint_states", "wrist/image", "image", "command"]

    def test_inputs_may_be_remapped(self, tmp_path):
        names = {"/edgellm/wrist/image": "/wrist_camera", "/edgellm/joint_states": "/joint_states"}
        remappings = parse_remappings(["/wrist_camera:=~/wrist/image", "/joint_states:=joint_states"])
        played = inputs_of_policy(arm_bag(tmp_path / "bag", rename=names), remappings=remappings)
        assert played == ["joint_states", "wrist/image", "image", "command"]

    @pytest.mark.parametrize("name", ["image", *OF_POLICY])
    def test_needs_each_of_them(self, tmp_path, name):
        bag = arm_bag(tmp_path / "bag", rename={f"/edgellm/{name}": "/elsewhere"})
        with pytest.raises(BagError, match=rf"no messages for ~/{name} \(/edgellm/{name}\): name the topic"):
            inputs_of_policy(bag)

    def test_takes_one_type_of_images(self, tmp_path):
        bag = arm_bag(tmp_path / "bag", wrist=COMPRESSED)
        with pytest.raises(BagError, match="/edgellm/wrist/image sensor_msgs/msg/CompressedImage, expected"):
            inputs_of_policy(bag)

    def test_other_engines_do_not_take_its_inputs(self, tmp_path):
        bag = arm_bag(tmp_path / "bag")
        assert [m.name for m in inputs_of(bag, needs_odometry=False)] == ["image", "command"]
        words = "/edgellm/wrist/image: expected a remapping to one of ~/image, .*, got ~/wrist/image"
        with pytest.raises(BagError, match=words):
            inputs_of(bag, needs_odometry=False, remappings={"/edgellm/wrist/image": "wrist/image"})


class TestFramesLast:
    """Frames of ~/image behind other inputs of the same time; in milliseconds."""

    @staticmethod
    def played(*messages: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        """The order of messages of names, stamps and arrivals."""
        given = [InputMessage(name, "", b"", stamp * 10**6, clock * 10**6) for name, stamp, clock in messages]
        played = frames_last(given, OF_POLICY)
        return [(m.name, m.stamp // 10**6, m.clock // 10**6) for m in played]

    def test_a_frame_waits_for_those_that_are_as_new(self):
        first, second = ("joint_states", 100, 101), ("wrist/image", 98, 112)
        played = self.played(("image", 100, 105), first, second, ("joint_states", 110, 113))
        assert played == [first, second, ("image", 100, 112), ("joint_states", 110, 113)]

    def test_a_frame_does_not_wait_for_those_that_were_there(self):
        messages = [("joint_states", 100, 101), ("wrist/image", 100, 102), ("image", 100, 105)]
        assert self.played(*messages, ("command", 120, 120)) == [*messages, ("command", 120, 120)]

    def test_a_command_ends_the_wait(self):
        frame, command, late = ("image", 100, 105), ("command", 106, 106), ("wrist/image", 100, 107)
        assert self.played(frame, command, late) == [frame, command, late]

    def test_the_wait_ends_after_50_ms(self):
        frame, joints, late = ("image", 100, 105), ("joint_states", 100, 110), ("wrist/image", 100, 156)
        assert self.played(frame, joints, late) == [joints, ("image", 100, 110), late]

    def test_the_next_frame_ends_the_wait(self):
        frames = [("image", 100, 105), ("image", 133, 138)]
        assert self.played(*frames) == frames


@pytest.mark.parametrize("kind", ["std_msgs/msg/Header", "foo_msgs/msg/Pose"])
def test_a_topic_of_another_or_an_unknown_type(tmp_path, kind):
    bag = copy_bag(tmp_path / "bag")
    data = (bag / "bag.mcap").read_bytes()
    # Of the same length, so that the file keeps its structure.
    other = kind.encode().ljust(len(b"nav_msgs/msg/Odometry"), b"X")
    (bag / "bag.mcap").write_bytes(data.replace(b"nav_msgs/msg/Odometry", other))
    with pytest.raises(BagError, match=rf"type {other.decode()}, expected nav_msgs/msg/Odometry for ~/odom"):
        inputs_of(bag / "bag.mcap")


def test_a_type_that_was_defined_otherwise_when_the_bag_was_recorded(tmp_path):
    bag = copy_bag(tmp_path / "bag")
    with Bag(bag) as opened:
        ours = opened.topics["/edgellm/audio"].type_hash
    metadata = bag / "metadata.yaml"
    metadata.write_text(metadata.read_text().replace(ours, "RIHS01_" + "0" * 64))
    with pytest.raises(BagError, match="another definition of edgellm_ros/msg/AudioChunk: RIHS01_0000"):
        inputs_of(bag)


def test_a_message_that_is_not_of_its_type(tmp_path):
    messages = [("/edgellm/command", STRING, 5, string("go")), ("/edgellm/command", STRING, 6, b"\0\1\0\0\7")]
    bag = write_bag(tmp_path / "bag", messages)
    with pytest.raises(BagError, match=r"damaged: the message of /edgellm/command at 6 ns is not a std_msgs"):
        inputs_of(bag, needs_image=False, needs_odometry=False)


def test_a_time_that_is_none(tmp_path):
    bag = write_bag(tmp_path / "bag", [("/edgellm/command", STRING, 2**62, string("go"))])
    with pytest.raises(BagError, match="not a time"):
        inputs_of(bag, needs_image=False, needs_odometry=False)


def test_a_stamp_before_the_beginning_of_time(tmp_path):
    image = make(COMPRESSED, header=header(-1), format="jpeg", data=np.zeros(1, np.uint8))
    bag = write_bag(tmp_path / "bag", [("/edgellm/image", COMPRESSED, 5, image), COMMAND])
    with pytest.raises(BagError, match=r"/edgellm/image with the stamp -1 ns: not a time"):
        inputs_of(bag, needs_odometry=False)


def test_the_clock_of_a_simulation_is_the_clock(tmp_path):
    """Recorded without use_sim_time: times are the computer's, stamps are simulated."""

    def clock(stamp: int):
        return make("rosgraph_msgs/msg/Clock", clock=header(stamp).stamp)

    def odometry(stamp: int) -> bytes:
        return next(m.data for m in inputs_of(ARENA) if m.name == "odom" and m.stamp == stamp)

    now = 1_700_000_000 * 10**9
    first, second = (m.stamp for m in inputs_of(ARENA)[:2])
    messages = [
        ("/edgellm/odom", "nav_msgs/msg/Odometry", now, odometry(first)),
        ("/clock", "rosgraph_msgs/msg/Clock", now + 1, clock(second)),
        ("/edgellm/odom", "nav_msgs/msg/Odometry", now + 2, odometry(second)),
        ("/edgellm/command", STRING, now + 3, string("go")),
    ]
    played = inputs_of(write_bag(tmp_path / "bag", messages), needs_image=False)
    assert [m.clock for m in played] == [first, second, second]
    assert [m.stamp for m in played] == [first, second, second]
