# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API in the node: parameters that are refused, and priorities."""

from __future__ import annotations

import sys

import pytest
import rclpy
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter

from edgellm_ros.ros.node.node import EdgeLLMNode
from edgellm_ros.ros.node.openai_endpoint import OpenAIEndpoint
from fixtures.served_openai import KEY, MODEL, ScriptedRuntime, client, free_port


@pytest.fixture
def node(domain):
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=domain)
    node = EdgeLLMNode(context=context)
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


def problem_of(node, **parameters) -> str:
    """Configure in vain, and return why."""
    node.set_parameters([Parameter(name, value=value) for name, value in parameters.items()])
    assert node.trigger_configure() == TransitionCallbackReturn.FAILURE
    assert node.state == "unconfigured"
    return node._problem


def test_missing_packages_are_named_with_their_extra(node, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    problem = problem_of(node, serve_port=8000)
    assert problem == (
        "cannot serve OpenAI's API: parameter serve_port needs starlette, uvicorn and prometheus-client: "
        "pip install 'edgellm[serve]'"
    )
    assert "engine_dir is empty" in problem_of(node, serve_port=0)


def test_other_computers_need_a_token(node, tmp_path):
    problem = problem_of(node, serve_port=8000, serve_host="0.0.0.0")
    assert "serve_host 0.0.0.0: other computers can connect, which needs serve_token_file" in problem
    (tmp_path / "token").write_text(KEY)
    assert "engine_dir is empty" in problem_of(node, serve_token_file=str(tmp_path / "token"))
    problem = problem_of(node, serve_no_token=True)
    assert "serve_token_file and serve_no_token: give one of them" in problem


def test_a_token_file_that_is_missing_is_named(node):
    assert "/no/token" in problem_of(node, serve_port=8000, serve_token_file="/no/token")


def test_a_policy_has_no_words(node, policy_engine):
    problem = problem_of(node, serve_port=8000, engine_dir=str(policy_engine))
    assert "parameter serve_port needs an engine that answers with text; this one is a policy" in problem


@pytest.mark.parametrize(
    ("priorities", "expected"), [([""], -10), (["serve=3", "/agent=5"], 3), (["/agent=5"], -10)]
)
def test_requests_have_the_lowest_priority_of_goals_or_that_of_the_parameter(
    node, tiny_engine, monkeypatch, priorities, expected
):
    asked = []
    runtime = ScriptedRuntime(tiny_engine)
    answer = runtime.submit
    monkeypatch.setattr(
        runtime, "submit", lambda request, priority: asked.append(priority) or answer(request, priority)
    )
    port = free_port()
    node.set_parameters([Parameter("serve_port", value=port), Parameter("serve_model_name", value=MODEL)])
    endpoint = OpenAIEndpoint(runtime, node._live_parameters)
    node.set_parameters([Parameter("client_priorities", value=priorities)])
    endpoint.open()
    try:
        with client(port) as made:
            made.completions.create(model=MODEL, prompt="go")
    finally:
        endpoint.destroy()
    assert asked == [expected]
