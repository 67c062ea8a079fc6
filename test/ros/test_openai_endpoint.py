# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client and the node, beside commands, goals and transitions."""

from __future__ import annotations

import itertools
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import openai
import pytest
from edgellm_ros.action import Plan
from edgellm_ros.srv import SaveSystemPrompt, SwitchLora

from fixtures.mutated_http import Request
from fixtures.peer import image_message
from fixtures.served_openai import KEY, client, free_port
from fixtures.tiny_adapter import write_adapter

MODEL = "arena"
LONG = {"extra_body": {"regex": "[qxzj]{4000}"}, "max_tokens": 700}  # seconds
ENDLESS = {"extra_body": {"regex": "[qxzj]{4000}"}, "max_tokens": 1400}  # for tests that end it
QUESTION = [{"role": "user", "content": "what do you see?"}]


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The demo's engine with room for long answers."""
    from edgellm_ros.builder import export
    from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT

    directory = tmp_path_factory.mktemp("engine") / MODEL
    export(ARENA_CHECKPOINT, directory, max_kv_cache_capacity=1600, max_lora_rank=8)
    return directory


@pytest.fixture(scope="module")
def node(start_node, peer, engine, port, tmp_path_factory):
    """The node with a token, active."""
    token_file = tmp_path_factory.mktemp("token") / "token"
    token_file.write_text(KEY)
    child = start_node(
        engine_dir=engine, autostart="true", max_input_age=3.0, plan_timeout=30.0,
        input_reliability="reliable", serve_port=port, serve_token_file=token_file,
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture
def robot(node, peer):
    """The peer of the active node."""
    peer.clear()
    return peer


@pytest.fixture
def agent(robot, port):
    """OpenAI's client with the node's token."""
    with client(port, KEY) as made:
        yield made


def chat(agent, model=MODEL, **options):
    return agent.chat.completions.create(model=model, messages=QUESTION, **options)


def text_of(answer) -> str:
    return answer.choices[0].message.content


def text_of_events(events) -> str:
    return "".join(event.choices[0].delta.content or "" for event in events)


def begun(agent, **options):
    """Return the stream of an answer that has begun."""
    stream = chat(agent, stream=True, **options)
    while not text_of_events([next(stream)]):
        pass
    return stream


def names(agent) -> list[str]:
    return [model.id for model in agent.models.list()]


def is_running(robot, count: int = 1) -> bool:
    return robot.metrics()["serve_requests_running"] == count


def test_an_agent_chats_while_the_robot_drives(robot, agent, scene):
    alone = text_of(chat(agent, **LONG))
    before = robot.metrics()
    stream = begun(agent, **LONG)
    robot.frame(scene.pixels)
    robot.command(scene.command)
    robot.wait(lambda: robot.received["action_chunk"], "chunk")
    assert is_running(robot)  # its steps waited for those of the plan
    assert alone.endswith(text_of_events(stream))
    values = robot.metrics()
    assert values["plans_completed"] == before["plans_completed"] + 1
    assert values["scheduling_paused"] == before["scheduling_paused"] + 1


def test_goals_come_before_requests(robot, agent, scene):
    before = robot.metrics()
    with begun(agent, **ENDLESS):
        result = robot.plan(Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)]))
        assert result.termination_reason == Plan.Result.COMPLETED
        assert is_running(robot)
    assert robot.metrics()["scheduling_paused"] == before["scheduling_paused"] + 1


def test_the_metrics_count_requests(robot, agent):
    before = robot.metrics()
    answer = chat(agent, max_tokens=5)
    with pytest.raises(openai.BadRequestError):
        chat(agent, max_tokens=5, temperature=-1)
    values = robot.metrics()
    grown = {name: values[f"serve_{name}"] - before[f"serve_{name}"] for name in (
        "requests_answered", "requests_refused", "requests_failed", "prompt_tokens", "generated_tokens",
    )}  # fmt: skip
    assert grown == {
        "requests_answered": 1,
        "requests_refused": 1,
        "requests_failed": 0,
        "prompt_tokens": answer.usage.prompt_tokens,
        "generated_tokens": answer.usage.completion_tokens,
    }
    shown = {value.key for value in robot.status("plans").values}
    assert shown >= {"serve_requests_running", "serve_clients_left"}


def test_models_are_the_engine_and_its_adapters_whichever_is_active(robot, agent):
    base, adapter, *_ = names(agent)
    assert base == MODEL
    before = text_of(chat(agent, max_tokens=20))
    assert robot.call(SwitchLora, "switch_lora", name=adapter).success
    assert text_of(chat(agent, max_tokens=20)) == before
    assert robot.call(SwitchLora, "switch_lora", name="base").success


class TestAdaptersThatAreRemoved:
    """Requests that run keep their adapter; others end with an error."""

    @pytest.fixture
    def late(self, robot, agent, tmp_path):
        """An adapter that was added while the node ran, with random weights."""
        from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT

        write_adapter(tmp_path / "late", ARENA_CHECKPOINT)
        assert robot.set_parameter("loras", [f"late={tmp_path / 'late'}"]).successful
        robot.wait(lambda: "late" in names(agent), "adapter")
        return "late"

    def test_a_request_that_runs_keeps_it(self, robot, agent, late):
        with begun(agent, model=late, **ENDLESS) as stream:
            assert robot.set_parameter("loras", [""]).successful
            robot.wait(lambda: late not in names(agent), "adapter that is removed")
            assert text_of_events(itertools.islice(stream, 20))
        with pytest.raises(openai.NotFoundError, match="model: 'late' does not exist"):
            chat(agent, model=late)

    def test_a_request_that_waits_is_refused(self, robot, agent, late):
        with ExitStack() as rows, ThreadPoolExecutor(1) as thread:
            for _ in range(4):  # max_batch_size
                rows.enter_context(begun(agent, **ENDLESS))
            waiting = thread.submit(chat, agent, model=late, max_tokens=5)
            robot.wait(lambda: is_running(robot, 5), "request that waits")
            assert robot.set_parameter("loras", [""]).successful
            robot.wait(lambda: late not in names(agent), "adapter that is removed")
            assert not waiting.done()
            rows.close()
            with pytest.raises(openai.BadRequestError, match="late"):
                waiting.result()


def test_a_system_prompt_is_saved_while_no_request_is_answered(robot, agent):
    with begun(agent, **ENDLESS):
        refused = robot.call(SaveSystemPrompt, "save_system_prompt", system_prompt="You are a small robot.")
    assert "requests of OpenAI's API are being answered" in refused.message
    robot.wait(lambda: is_running(robot, 0), "end of the request")
    assert robot.call(SaveSystemPrompt, "save_system_prompt", system_prompt="You are a small robot.").success


def test_without_the_token_nothing_is_answered(robot, port):
    with client(port, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        chat(stranger)


def test_a_client_that_vanishes_ends_its_own_request_alone(robot, agent, port):
    left = robot.metrics()["serve_clients_left"]
    body = json.dumps({"messages": QUESTION, "stream": True, "max_tokens": 1400, "regex": "[qxzj]{4000}"})
    lines = (f"Authorization: Bearer {KEY}",)
    with begun(agent, **ENDLESS) as stream:
        with socket.create_connection(("127.0.0.1", port), 10) as vanishing:
            vanishing.sendall(Request("/v1/chat/completions", body.encode(), lines=lines).raw())
            assert b"200 OK" in vanishing.recv(100)
        robot.wait(lambda: robot.metrics()["serve_clients_left"] == left + 1, "client that has left")
        assert is_running(robot)
        assert text_of_events(itertools.islice(stream, 20))


def test_deactivation_ends_requests_and_activation_takes_them_again(robot, agent):
    stream = begun(agent, **ENDLESS)
    with ThreadPoolExecutor(1) as thread:
        whole = thread.submit(chat, agent, **ENDLESS)
        robot.wait(lambda: is_running(robot, 2), "requests that run")
        assert robot.transition("deactivate")
        with pytest.raises(openai.InternalServerError, match="the server stops") as stopped:
            whole.result()
    assert stopped.value.status_code == 503
    with pytest.raises(openai.APIError, match="the server stops"):
        list(stream)
    with pytest.raises(openai.APIConnectionError):
        chat(agent)
    assert robot.metrics()["serve_requests_running"] == 0
    assert robot.transition("activate")
    assert chat(agent, max_tokens=5).usage.completion_tokens == 5


def test_a_port_in_use_is_named_and_the_node_stays_usable(robot, agent, node, port):
    assert robot.transition("deactivate")
    with socket.create_server(("127.0.0.1", port)):
        assert not robot.transition("activate")
        assert robot.state() == "inactive"
        problem = "cannot serve OpenAI's API: parameter serve_port: Address already in use"
        assert problem in node.log.read_text()
        robot.wait(lambda: problem in robot.status("engine").message, "diagnostics")
    assert robot.transition("activate")
    robot.wait(lambda: robot.status("engine").message == "ok", "diagnostics")
    assert chat(agent, max_tokens=5).usage.completion_tokens == 5


def test_parameters_are_fixed_and_hold_no_token(robot, node):
    refused = robot.set_parameter("serve_port", 0)
    assert "serve_port can only be set while the node is unconfigured" in refused.reason
    assert KEY not in node.log.read_text()


def test_the_process_ends_in_order_while_a_request_runs(robot, agent, node):
    stream = begun(agent, **ENDLESS)
    assert node.stop(timeout_s=20) == 0
    with pytest.raises(openai.APIError):
        list(stream)
    assert "Traceback" not in node.log.read_text()
