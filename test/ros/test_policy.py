# SPDX-License-Identifier: Apache-2.0
"""A robot's policy: its names, its form, and the keystore that sros2 makes of it."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

from edgellm_ros import cli
from edgellm_ros.ros.security.access import INTERFACES
from edgellm_ros.ros.security.keystore import make_keystore
from edgellm_ros.ros.security.policy import (
    CALL,
    EXECUTE,
    PUBLISH,
    REPLY,
    REQUEST,
    SUBSCRIBE,
    make_enclaves,
    parse_remapping,
    policy_xml,
)

pytestmark = pytest.mark.only_on("cpu", reason="nothing here runs on a device")
HAS_SROS2 = importlib.util.find_spec("sros2") is not None


def enclaves(namespace="/robot", remappings=(), **options):
    return {each.node: each for each in make_enclaves(namespace, dict(remappings), **options)}


class TestNames:
    def test_names_are_below_the_namespace(self):
        found = enclaves("fleet/robot_1")
        assert found["edgellm"].path == "/fleet/robot_1/edgellm"
        assert "/fleet/robot_1/edgellm/text" in found["edgellm"].allowed[PUBLISH]
        assert "/fleet/robot_1/edgellm/switch_lora" in found["operator"].allowed[REQUEST]

    def test_without_a_namespace_names_begin_with_the_node(self):
        found = enclaves("/")
        assert found["edgellm"].path == "/edgellm"
        assert found["plan_client"].allowed[CALL] == {"/edgellm/plan"}

    def test_a_remapped_topic_is_allowed_by_its_new_name_only(self):
        found = enclaves(remappings=[parse_remapping("edgellm:~/path:=/camera/path")])
        assert "/camera/path" in found["edgellm"].allowed[PUBLISH]
        assert "/camera/path" in found["monitor"].allowed[SUBSCRIBE]
        assert "/robot/edgellm/path" not in found["edgellm"].allowed[PUBLISH]
        assert "/robot/edgellm/path" not in found["monitor"].allowed[SUBSCRIBE]

    def test_a_remapping_is_relative_to_the_namespace(self):
        found = enclaves(remappings=[parse_remapping("edgellm:~/image:=camera/image")])
        assert "/robot/camera/image" in found["edgellm"].allowed[SUBSCRIBE]

    def test_a_renamed_node_has_its_names_and_enclave(self):
        found = enclaves(remappings=[parse_remapping("edgellm:__node:=brain")])
        assert found["brain"].path == "/robot/brain"
        assert found["brain"].allowed[EXECUTE] == found["plan_client"].allowed[CALL] == {"/robot/brain/plan"}

    def test_every_client_has_an_enclave(self):
        found = enclaves(clients=["mission", "voice"])
        assert found["mission"].allowed[CALL] == found["voice"].allowed[CALL] == {"/robot/edgellm/plan"}
        assert "plan_client" not in found

    def test_the_follower_has_the_topics_of_its_launch_file(self):
        follower = enclaves()["edgellm_follower"]
        assert {"/robot/edgellm/action_chunk", "/robot/odom"} <= follower.allowed[SUBSCRIBE]
        assert "/robot/cmd_vel" in follower.allowed[PUBLISH]

    def test_further_cameras_of_a_policy_are_heard_under_their_names_or_remapped(self):
        remapping = parse_remapping("edgellm:~/left_arm/image:=/left/image_raw", ["wrist", "left.arm"])
        found = enclaves(remappings=[remapping], cameras=["wrist", "left.arm"])["edgellm"]
        assert {"/robot/edgellm/wrist/image", "/left/image_raw"} <= found.allowed[SUBSCRIBE]
        assert "/robot/edgellm/left_arm/image" not in found.allowed[SUBSCRIBE]
        assert "/robot/edgellm/wrist/image" not in enclaves()["edgellm"].allowed[SUBSCRIBE]
        with pytest.raises(ValueError, match="the node edgellm has no '~/wrist/image'"):
            parse_remapping("edgellm:~/wrist/image:=/wrist/image_raw")

    def test_with_the_arena_the_follower_has_the_topics_of_the_demo(self):
        found = enclaves(arena=True)
        assert "/robot/edgellm/odom" in found["edgellm_follower"].allowed[SUBSCRIBE]
        assert "/robot/edgellm/odom" in found["arena"].allowed[PUBLISH]

    @pytest.mark.parametrize("namespace", ["a b", "a//b", "1a", "a__b", "a/*"])
    def test_a_namespace_that_ros_does_not_allow_is_refused(self, namespace):
        with pytest.raises(ValueError, match=r"namespace must be a name of ROS: .*, got "):
            enclaves(namespace)

    @pytest.mark.parametrize("client", ["", "a/b", "*", "a-b"])
    def test_a_client_that_ros_does_not_allow_is_refused(self, client):
        with pytest.raises(ValueError, match=r"client must be a name of ROS: .*, got "):
            enclaves(clients=[client])

    def test_a_wildcard_in_a_remapping_is_refused(self):
        with pytest.raises(ValueError, match=r"new name of ~/image must be a name of ROS"):
            enclaves(remappings=[parse_remapping("edgellm:~/image:=/*")])

    def test_two_nodes_of_one_name_are_refused(self):
        with pytest.raises(ValueError, match="two nodes are called /robot/edgellm"):
            enclaves(clients=["edgellm"])

    @pytest.mark.parametrize(
        "text, reason",
        [
            ("~/image:=/camera", "a remapping must be NODE:~/NAME:=NEW"),
            ("edgellm:~/image", "a remapping must be NODE:~/NAME:=NEW"),
            (
                "edgelm:~/image:=/camera",
                "no node 'edgelm', expected one of edgellm, edgellm_follower, edgellm_arm, edgellm_play, "
                "arena",
            ),
            ("edgellm:~/imgae:=/camera", "the node edgellm has no '~/imgae'"),
        ],
    )
    def test_a_remapping_that_renames_nothing_is_refused(self, text, reason):
        with pytest.raises(ValueError, match=reason):
            parse_remapping(text)


class TestRights:
    def test_a_monitor_calls_nothing_that_changes_the_robot(self):
        changing = "switch set change save stop resume plan cancel"
        called = {name.rpartition("/")[2] for name in enclaves()["monitor"].allowed[REQUEST]}
        assert called
        assert not {name for name in called if name.split("_")[0] in changing.split()}
        assert not enclaves()["monitor"].allowed[CALL]

    def test_a_monitor_publishes_only_its_own_log_and_parameters(self):
        assert enclaves()["monitor"].allowed[PUBLISH] == {"/rosout", "/parameter_events"}

    def test_a_plan_client_calls_the_action_and_nothing_else(self):
        client = enclaves()["plan_client"]
        assert client.allowed[CALL] == {"/robot/edgellm/plan"}
        assert not client.allowed[REQUEST]
        assert client.allowed[SUBSCRIBE] == {"/clock"}

    def test_an_operator_may_call_every_service_of_the_lifecycle_nodes(self):
        found = enclaves()
        nodes = ("edgellm", "edgellm_follower", "edgellm_arm")
        served = set().union(*(found[node].allowed[REPLY] for node in nodes))
        assert found["operator"].allowed[REQUEST] == served


class TestForm:
    def test_the_elements_are_those_of_the_schema_of_sros2(self):
        policy = ElementTree.fromstring(policy_xml(make_enclaves("/robot", {})).encode())
        assert (policy.tag, policy.attrib) == ("policy", {"version": "0.2.0"})
        (listed,) = policy
        assert listed.tag == "enclaves"
        rights = {
            "topics": ("topic", {"publish", "subscribe"}),
            "services": ("service", {"reply", "request"}),
            "actions": ("action", {"execute", "call"}),
        }
        for enclave in listed:
            assert (enclave.tag, set(enclave.attrib)) == ("enclave", {"path"})
            ((profile,),) = enclave
            assert (profile.tag, set(profile.attrib)) == ("profile", {"ns", "node"})
            assert enclave.get("path") == f"{profile.get('ns')}/{profile.get('node')}"
            for group in profile:
                element, attributes = rights[group.tag]
                ((attribute, value),) = group.attrib.items()
                assert attribute in attributes
                assert value == "ALLOW"
                assert {each.tag for each in group} == {element}

    def test_only_the_nodes_of_ros2_commands_have_a_wildcard(self):
        policy = ElementTree.fromstring(policy_xml(make_enclaves("/", {})).encode())
        names = {each.text or "" for each in policy.iter()}
        assert {name for name in names if "*" in name} == {"/_ros2cli*/get_type_description"}

    def test_no_row_of_the_table_is_there_twice(self):
        rows = [(each.node, each.kind, each.name) for each in INTERFACES]
        assert len(rows) == len(set(rows))


@pytest.fixture
def sros2(monkeypatch, tmp_path) -> ModuleType:
    """A stand-in for sros2 whose enclaves may do everything until `create_permission`.

    Real enclaves are like that.
    """
    errors, keystore, package = ModuleType("sros2.errors"), ModuleType("sros2.keystore"), ModuleType("sros2")
    errors.SROS2Error = type("SROS2Error", (Exception,), {})

    def create_keystore(path):
        (path / "public").mkdir(parents=True)

    def create_enclave(path, enclave):
        folder = path / "enclaves" / enclave.lstrip("/")
        folder.mkdir(parents=True)
        for name in ("key.pem", "permissions.xml", "permissions.p7s"):
            (folder / name).write_text("everything")

    def create_permission(path, enclave, policy):
        (path / "enclaves" / enclave.lstrip("/") / "permissions.p7s").write_text(policy.read_text())

    keystore.is_valid_keystore = lambda path: (path / "public").is_dir()
    for function in (create_keystore, create_enclave, create_permission):
        setattr(keystore, function.__name__, function)
    package.errors, package.keystore = errors, keystore
    for module in (package, errors, keystore):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


class TestKeystore:
    def test_an_enclave_whose_permissions_cannot_be_made_may_do_nothing(self, sros2, tmp_path):
        def fail(*arguments):
            raise sros2.errors.SROS2Error("unable to find enclave")

        sros2.keystore.create_permission = fail
        with pytest.raises(ValueError, match="sros2: unable to find enclave"):
            make_keystore(tmp_path / "keystore", tmp_path / "policy.xml", ["/robot/monitor"])
        folder = tmp_path / "keystore/enclaves/robot/monitor"
        assert [path.name for path in folder.iterdir()] == ["key.pem"]

    def test_only_the_user_may_read_private_keys(self, sros2, tmp_path):
        policy = tmp_path / "policy.xml"
        policy.write_text("policy")
        before = os.umask(0o022)
        try:
            make_keystore(tmp_path / "keystore", policy, ["/robot/monitor"])
            assert os.umask(0o022) == 0o022
        finally:
            os.umask(before)
        key = tmp_path / "keystore/enclaves/robot/monitor/key.pem"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


class TestCommand:
    def test_without_sros2_the_next_command_is_named(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("edgellm_ros.ros.security.keystore.has_sros2", lambda: False)
        out = tmp_path / "security"
        assert cli.main(["security", "--namespace", "/robot", "--out", str(out)]) == 0
        assert (out / "policy.xml").read_text() == policy_xml(make_enclaves("/robot", {}))
        command = f"ros2 security generate_artifacts -k {out}/keystore -p {out}/policy.xml"
        assert command in capsys.readouterr().out

    def test_a_camera_of_a_policy_is_an_option(self, tmp_path):
        remapping = "edgellm:~/left/image:=/left/image_raw"
        options = ["--camera", "wrist", "--camera", "left", "--remap", remapping]
        assert cli.main(["security", "--out", str(tmp_path), *options]) == 0
        rules = dict([parse_remapping(remapping, ["left"])])
        expected = policy_xml(make_enclaves("/", rules, cameras=["wrist", "left"]))
        assert (tmp_path / "policy.xml").read_text() == expected

    def test_a_wrong_remapping_is_one_line_and_writes_nothing(self, tmp_path, capsys):
        out = tmp_path / "security"
        assert cli.main(["security", "--out", str(out), "--remap", "edgellm:~/imgae:=/camera"]) == 2
        assert "the node edgellm has no '~/imgae'" in capsys.readouterr().err
        assert not out.exists()

    @pytest.mark.skipif(not HAS_SROS2, reason="sros2 is a part of ROS, and not on PyPI")
    def test_with_sros2_every_enclave_gets_the_permissions_of_the_policy(self, tmp_path, capsys):
        out = tmp_path / "security"
        assert cli.main(["security", "--namespace", "/robot", "--out", str(out), "--json"]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        for enclave in make_enclaves("/robot", {}):
            assert enclave.path in result["enclaves"]
            permissions = ElementTree.parse(out / f"keystore/enclaves{enclave.path}/permissions.xml")
            found = {element.text for element in permissions.iter("topic")}
            assert {f"rt{name}" for name in enclave.allowed[PUBLISH]} <= found
            assert {f"rr{name}Reply" for name in enclave.allowed[REPLY]} <= found
            assert "*" not in found
