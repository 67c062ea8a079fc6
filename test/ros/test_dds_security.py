# SPDX-License-Identifier: Apache-2.0
"""The node under DDS security, with keys and permissions of `edgellm security`.

Runs where sros2 is installed and the middleware has security, as in ROS's own packages; Fast DDS from PyPI
has none.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from edgellm_ros import cli
from edgellm_ros.ros.processes import ros_environment

pytestmark = [
    pytest.mark.only_on("cpu", reason="rights do not depend on the device"),
    pytest.mark.skipif(
        importlib.util.find_spec("sros2") is None, reason="sros2 is a part of ROS, and not on PyPI"
    ),
]
NODE = "import rclpy; rclpy.init(); node = rclpy.create_node({name!r})\n"
CALL = """
from edgellm_ros.srv import SwitchLora
client = node.create_client(SwitchLora, "edgellm/switch_lora")
for _ in range(10):  # the first answers may be lost
    answer = client.call_async(SwitchLora.Request(name="base"))
    rclpy.spin_until_future_complete(node, answer, timeout_sec=3)
    if answer.done():
        print("answered:", answer.result().success)
        break
"""
PLAN = """
import numpy
from edgellm_ros.client import PlanClient
with PlanClient(node, connect_timeout_s=30) as client:
    frame = numpy.zeros((64, 64, 3), numpy.uint8)
    print("planned:", client.plan("go", images=frame).reply.termination_reason)
"""


def run(name: str, program: str) -> str:
    """Output of a node's program in the enclave with its name."""
    environment = ros_environment(int(os.environ["ROS_DOMAIN_ID"]))
    environment["ROS_SECURITY_ENCLAVE_OVERRIDE"] = f"/{name}"
    done = subprocess.run(
        [sys.executable, "-c", NODE.format(name=name) + program],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def secured(domain, tmp_path_factory, start_node, arena_engine) -> Iterator[None]:
    """The active node, in a domain in which DDS security is enforced."""
    out = tmp_path_factory.mktemp("security")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROS_DOMAIN_ID", str(domain))
        assert cli.main(["security", "--out", str(out)]) == 0
        environment.setenv("ROS_SECURITY_ENABLE", "true")
        environment.setenv("ROS_SECURITY_STRATEGY", "Enforce")
        environment.setenv("ROS_SECURITY_KEYSTORE", str(out / "keystore"))
        said = run("monitor", "print('made')")
        if "security libraries" in said:
            pytest.skip("the middleware was built without security")
        assert "made" in said, said
        environment.setenv("ROS_SECURITY_ENCLAVE_OVERRIDE", "/edgellm")
        start_node(engine_dir=arena_engine, autostart="true", plan_timeout=60.0)
        yield


def test_a_plan_client_plans(secured):
    assert "planned: completed" in run("plan_client", PLAN)


def test_an_operator_switches_adapters(secured):
    assert "answered: True" in run("operator", CALL)


@pytest.mark.parametrize("name", ["monitor", "plan_client"])
def test_a_client_without_the_right_to_switch_adapters_is_refused(secured, name):
    said = run(name, CALL)
    assert "answered" not in said
    assert "failed to create client" in said


def test_a_node_with_the_name_of_another_enclave_is_refused(secured):
    said = run("monitor", "rclpy.create_node('edgellm'); print('made')")
    assert "made" not in said
    assert "failed to create" in said
