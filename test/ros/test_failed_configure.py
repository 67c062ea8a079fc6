# SPDX-License-Identifier: Apache-2.0
"""A part of the node that cannot be made, such as a topic that a policy denies."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import rclpy
from rclpy.lifecycle import TransitionCallbackReturn

from edgellm_ros.engine_directory.parts import EngineParts
from edgellm_ros.ros.node import node as node_module
from edgellm_ros.ros.node import parts as parts_module
from edgellm_ros.ros.node import plan_server as plan_server_module


@pytest.fixture
def node(domain):
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=domain)
    node = node_module.EdgeLLMNode(context=context)
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


@pytest.mark.parametrize(
    ("module", "part"),
    [
        (parts_module, "Outputs"),
        (parts_module, "LoraChanges"),
        (parts_module, "Services"),
        (plan_server_module, "ActionServer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_leaves_no_thread_and_no_engines_and_the_node_can_be_configured_again(
    node, monkeypatch, module, part
):
    closed = []
    builder = SimpleNamespace(max_action_samples=1, max_batch_size=1)
    config = SimpleNamespace(audio=None, vision=None, action=None, expert=None, policy=None, builder=builder)
    runtime = SimpleNamespace(
        config=config,
        parts=EngineParts(config),
        has_draft_model=False,
        rows=1,
        lora_names=lambda: [],
        close=lambda: closed.append(True),
        closed=True,
    )
    monkeypatch.setattr(node_module, "open_runtime", lambda parameters, logger: runtime)

    def refused(*parts, **options):
        raise RuntimeError("not allowed")

    with monkeypatch.context() as broken:
        broken.setattr(module, part, refused)
        assert node.trigger_configure() == TransitionCallbackReturn.ERROR
    assert node.state == "unconfigured"
    assert closed == [True]
    assert "edgellm-plan" not in [thread.name for thread in threading.enumerate()]
    assert node.trigger_configure() == TransitionCallbackReturn.SUCCESS
    assert node.trigger_activate() == TransitionCallbackReturn.SUCCESS
