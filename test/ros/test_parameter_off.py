# SPDX-License-Identifier: Apache-2.0
"""`off` as a value of a parameter, which YAML reads as false; loading of dumps."""

from __future__ import annotations

import pytest
import rclpy
import yaml
from rclpy.node import Node
from rclpy.parameter import Parameter, parameter_dict_from_yaml_file, parameter_value_to_python
from rclpy.parameter_client import AsyncParameterClient

from edgellm_ros.ros.follower import parameters as of_follower
from edgellm_ros.ros.node.settings import parameters as of_node
from edgellm_ros.ros.parameter_table import declare, value_problem

WITH_OFF = [
    (specs, name)
    for specs in (of_node.SPECS, of_follower.SPECS)
    for name, spec in specs.items()
    if "off" in spec.choices
]


@pytest.fixture(scope="module")
def context(domain):
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=domain)
    yield context
    rclpy.shutdown(context=context)


def declared(context: rclpy.Context, specs, arguments: list[str]) -> Node:
    node = Node("declared", context=context, cli_args=["--ros-args", *arguments])
    declare(node, specs, value_problem)
    return node


def test_both_switches_with_off_are_tested():
    assert {name for _, name in WITH_OFF} >= {"drafting", "chunking"}


@pytest.mark.parametrize("text", ["off", "Off", "false", "'off'"])
@pytest.mark.parametrize("specs, name", WITH_OFF)
def test_off_is_taken_at_the_start(context, specs, name, text):
    node = declared(context, specs, ["-p", f"{name}:={text}"])
    assert node.get_parameter(name).value == "off"
    node.destroy_node()


@pytest.mark.parametrize("value", [False, "off"])
@pytest.mark.parametrize("specs, name", WITH_OFF)
def test_off_is_taken_later(context, specs, name, value):
    other = next(choice for choice in specs[name].choices if choice != "off")
    node = declared(context, specs, ["-p", f"{name}:={other}"])
    for set_them in (node.set_parameters, lambda each: [node.set_parameters_atomically(each)]):
        assert node.set_parameters([Parameter(name, value=other)])[0].successful
        assert set_them([Parameter(name, value=value)])[0].successful
        assert node.get_parameter(name).value == "off"
    node.destroy_node()


@pytest.mark.parametrize("specs, name", WITH_OFF)
def test_true_is_not_off(context, specs, name):
    node = declared(context, specs, [])
    assert not node.set_parameters([Parameter(name, value=True)])[0].successful
    node.destroy_node()


def test_false_is_refused_where_off_is_no_value(context):
    with pytest.raises(rclpy.exceptions.InvalidParameterTypeException):
        declared(context, of_node.SPECS, ["-p", "plan_on:=off"])


@pytest.fixture(scope="module")
def dump(node, peer, context, tmp_path_factory):
    """What `ros2 param dump` writes of the configured node, and a client of it."""
    user = Node("user", context=context)
    client = AsyncParameterClient(user, "edgellm")
    executor = rclpy.executors.SingleThreadedExecutor(context=context)
    executor.add_node(user)
    assert client.wait_for_services(10.0)

    def wait(future):
        executor.spin_until_future_complete(future, 10.0)
        return future.result()

    names = wait(client.list_parameters()).result.names
    tree: dict = {}
    for name, value in zip(names, wait(client.get_parameters(names)).values, strict=True):
        *groups, last = name.split(".")
        group = tree
        for each in groups:
            group = group.setdefault(each, {})
        group[last] = parameter_value_to_python(value)
    path = tmp_path_factory.mktemp("dump") / "edgellm.yaml"
    path.write_text(yaml.dump({"/edgellm": {"ros__parameters": tree}}, default_flow_style=False))
    yield path, client, wait
    executor.shutdown()
    user.destroy_node()


def test_a_dump_is_loaded_again_but_for_what_is_read_only(dump):
    path, client, wait = dump
    results = wait(client.load_parameter_file(str(path))).results
    names = list(parameter_dict_from_yaml_file(str(path)))
    failed = {name: each.reason for name, each in zip(names, results, strict=True) if not each.successful}
    assert {name for name in failed if name in of_node.SPECS} == {"autostart"}
    assert all("read-only" in reason for reason in failed.values()), failed


def test_a_dump_starts_a_node(dump, context):
    path, _, _ = dump
    text = path.read_text().replace("/edgellm:", "/declared:").replace("'off'", "off")
    path.with_name("unquoted.yaml").write_text(text)
    assert "chunking: off" in text
    for file in ("unquoted.yaml", "edgellm.yaml"):
        node = declared(context, of_node.SPECS, ["--params-file", str(path.with_name(file))])
        assert node.get_parameter("chunking").value == "off"
        node.destroy_node()
