# SPDX-License-Identifier: Apache-2.0
"""~/plan through a real client: results, feedback, cancelling, queue, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Time
from edgellm_ros.action import Plan
from edgellm_ros.msg import AudioChunk, ChatMessage, SamplingParams, ToolCall
from sensor_msgs.msg import Image

from edgellm_ros.ros.processes import ros_environment
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.request import SamplingParams as RuntimeSamplingParams
from fixtures.peer import image_message

R = Plan.Result
# the library checks it in 0.5 s and compiles it in 1.1 s
LARGE_SCHEMA = json.dumps(
    {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(5000)}}
)

PARAMETERS = {"max_concurrent_plans": 1}  # a goal that runs makes others wait


@pytest.fixture(autouse=True)
def fresh(node, peer):
    peer.clear()


@pytest.fixture
def goal(scene):
    """A goal that can be planned: the frame comes with it."""
    return Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)])


@pytest.fixture
def long_goal(goal):
    """A goal that keeps the action head busy for seconds."""
    goal.action_samples, goal.denoise_steps = 16, 1000
    return goal


@pytest.fixture(scope="module")
def runtime(arena_engine, runtime_device):
    with LLMInferenceRuntime(arena_engine, runtime_device, drafting="off") as runtime:
        yield runtime


def assert_plans(peer, goal) -> None:
    """The node is as good as new."""
    result = peer.plan(goal)
    assert (result.termination_reason, result.message) == (R.COMPLETED, "")
    assert result.generation.text


class TestResult:
    def test_is_what_the_runtime_answers_in_process(self, peer, goal, scene, runtime):
        goal.noise_seed, goal.action_samples, goal.sampling.max_tokens = 7, 2, 50
        result = peer.plan(goal)
        sampling = RuntimeSamplingParams(max_tokens=50)
        request = LLMGenerationRequest(
            scene.command, images=(scene.pixels,), sampling=sampling, action_samples=2, noise_seed=7
        )
        expected = runtime.handle_request(request)
        assert list(result.generation.token_ids) == expected.token_ids
        assert result.generation.text == expected.text
        assert result.generation.finish_reason == expected.finish_reason
        assert result.generation.prompt_token_count == expected.prompt_tokens
        for chunk, path, actions, states in zip(
            result.action_chunks, result.paths, expected.actions, expected.paths, strict=True
        ):
            np.testing.assert_array_equal(np.array(chunk.values).reshape(chunk.horizon, -1), actions)
            assert chunk.noise_seed == 7
            points = [(pose.pose.position.x, pose.pose.position.y) for pose in path.poses]
            np.testing.assert_array_equal(np.float32(points), states[:, :2])

    def test_carries_the_input_stamp_the_base_frame_and_one_request_id(self, peer, goal):
        goal.images[0].header.stamp = peer.now()
        result = peer.plan(goal)
        generation, chunk, path = result.generation, result.action_chunks[0], result.paths[0]
        for message in (generation, chunk, path, path.poses[0]):
            assert message.header.stamp == goal.images[0].header.stamp
        assert generation.header.frame_id == "camera"
        assert chunk.header.frame_id == path.header.frame_id == "base_link"
        assert chunk.request_id == generation.request_id != ""
        assert generation.action_chunk_count == len(result.action_chunks) == 1

    def test_describes_its_numbers(self, peer, goal):
        chunk = peer.plan(goal).action_chunks[0]
        assert list(chunk.names) == ["acceleration", "curvature"]
        assert list(chunk.units) == ["m/s^2", "1/m"]
        assert (chunk.dt, chunk.horizon, len(chunk.values)) == (0.1, 40, 80)

    def test_poses_of_a_path_are_stamped_dt_apart(self, peer, goal):
        goal.images[0].header.stamp = peer.now()
        poses = peer.plan(goal).paths[0].poses
        times = np.array([pose.header.stamp.sec * 10**9 + pose.header.stamp.nanosec for pose in poses])
        assert len(poses) == 41
        np.testing.assert_array_equal(np.diff(times), 10**8)

    def test_latencies_add_up(self, peer, goal):
        generation = peer.plan(goal).generation
        parts = (
            generation.queue_latency + generation.vision_latency + generation.prefill_latency
            + generation.decode_latency + generation.action_latency
        )  # fmt: skip
        assert 0 < parts <= generation.total_latency
        assert 0 < generation.first_token_latency < generation.total_latency

    def test_is_words_only_without_action_samples(self, peer, goal):
        goal.action_samples = 0
        result = peer.plan(goal)
        assert result.termination_reason == R.COMPLETED
        assert not result.action_chunks
        assert not result.paths

    def test_is_one_of_the_choices_or_matches_the_regular_expression(self, peer, goal):
        goal.action_samples = 0
        goal.sampling.choices = ["to the door", "to the window"]
        generation = peer.plan(goal).generation
        assert generation.text in goal.sampling.choices
        assert generation.grammar_complete
        goal.sampling.choices, goal.sampling.regex, goal.sampling.max_tokens = [], "[0-9]{90}", 3
        generation = peer.plan(goal).generation
        assert generation.text.isdigit()
        assert (generation.finish_reason, generation.grammar_complete) == ("length", False)

    def test_names_a_bad_grammar(self, peer, goal):
        goal.sampling.json_schema = '{"type": "text"}'
        result = peer.plan(goal)
        assert result.termination_reason == R.ERROR
        assert "Invalid type: text" in result.message

    def test_has_the_tool_calls_of_the_answer(self, peer, goal):
        """The node's parameter names the form: the demo's chat template writes no calls."""
        goal.action_samples, goal.sampling.max_tokens = 0, 200
        call = '<tool_call>{"name": "find", "arguments": {"what": "box"}}</tool_call>'
        goal.sampling.choices = [f"I go. {call}"]
        goal.tools = ['{"type": "function", "function": {"name": "find"}}']
        generation = peer.plan(goal).generation
        assert (generation.text, generation.content) == (goal.sampling.choices[0], "I go.")
        (found,) = generation.tool_calls
        assert (found.name, found.arguments) == ("find", '{"what": "box"}')
        goal.sampling.choices = ['<tool_call>{"name": 7}</tool_call>']
        generation = peer.plan(goal).generation
        assert (generation.content, generation.tool_calls) == (generation.text, [])
        assert generation.tool_call_errors == ["a tool call is not read: the name must be a string, got 7"]

    def test_follows_the_noise_seed(self, peer, goal):
        def values(seed):
            goal.noise_seed = seed
            return list(peer.plan(goal).action_chunks[0].values)

        assert values(1) == values(1) != values(2)

    def test_goes_to_the_topics_as_well(self, peer, goal):
        result = peer.plan(goal)
        received = peer.received
        peer.wait(lambda: result.generation in received["generation"], "published generation")
        peer.wait(lambda: result.action_chunks[0] in received["action_chunk"], "published chunk")
        peer.wait(lambda: result.paths[0] in received["path"], "published path")
        assert result.generation.text in [text.data for text in received["text"]]

    def test_tells_its_progress(self, peer, goal):
        call = peer.send(goal)
        call.wait_for_stage("action")  # rclpy drops the feedback that it takes after the result
        result = call.result()
        order = ["queued", "vision", "prefill", "decode", "action"]
        assert [stage for stage in order if stage in call.stages] == call.stages
        assert "decode" in call.stages
        texts = [feedback.text for feedback in call.feedback]
        assert all(result.generation.text.startswith(text) for text in texts)
        assert texts == sorted(texts, key=len)
        assert call.feedback[-1].tokens == result.generation.token_count


class TestEarlierMessages:
    def test_are_part_of_the_prompt_in_their_order(self, peer, goal, scene, runtime):
        earlier = scene.pixels[:, ::-1].copy()
        goal.system_prompt, goal.noise_seed, goal.sampling.max_tokens = "you are a robot", 7, 50
        goal.earlier_messages = [
            ChatMessage(role="user", text="what do you see?", images=[image_message(earlier)]),
            ChatMessage(role="assistant", text="a red box"),
        ]
        result = peer.plan(goal)
        messages = [
            Message("system", "you are a robot"),
            Message("user", [ImagePart(earlier), TextPart("what do you see?")]),
            Message("assistant", "a red box"),
            Message("user", [ImagePart(scene.pixels), TextPart(scene.command)]),
        ]
        sampling = RuntimeSamplingParams(max_tokens=50)
        expected = runtime.handle_request(
            LLMGenerationRequest(messages=messages, sampling=sampling, action_samples=1, noise_seed=7)
        )
        assert (result.termination_reason, result.message) == (R.COMPLETED, "")
        assert list(result.generation.token_ids) == expected.token_ids
        assert result.generation.prompt_token_count == expected.prompt_tokens
        if expected.actions is not None:
            chunk = result.action_chunks[0]
            values = np.array(chunk.values).reshape(chunk.horizon, -1)
            np.testing.assert_array_equal(values, expected.actions[0])


class TestCancel:
    @pytest.mark.parametrize("stage", ["vision", "prefill", "decode", "action"])
    def test_takes_effect_in_every_stage(self, peer, long_goal, stage):
        long_goal.images = long_goal.images * (2 if stage == "vision" else 1)
        call = peer.send(long_goal)
        call.ask_for_result()
        call.wait_for_stage(stage)
        assert call.cancel().goals_canceling
        result = call.result()
        assert result.termination_reason == R.CANCELLED
        assert result.message == "cancelled by the client"
        assert call.status == GoalStatus.STATUS_CANCELED
        assert not result.action_chunks
        long_goal.images, long_goal.action_samples, long_goal.denoise_steps = long_goal.images[:1], 1, 0
        assert_plans(peer, long_goal)

    def test_takes_effect_while_a_grammar_is_compiled(self, peer, goal):
        goal.sampling.json_schema = LARGE_SCHEMA
        call = peer.send(goal)
        call.ask_for_result()
        call.wait_for_stage("grammar")
        call.cancel()
        assert call.result().termination_reason == R.CANCELLED
        assert call.result().generation.text == ""
        goal.sampling.json_schema = ""
        assert_plans(peer, goal)

    def test_ends_a_waiting_goal_at_once(self, peer, long_goal):
        running = peer.send(long_goal)
        running.wait_for_stage("action")
        waiting = peer.send(long_goal)
        waiting.ask_for_result()
        waiting.cancel()
        assert waiting.result().termination_reason == R.CANCELLED
        assert not running.ask_for_result().done()
        running.cancel()
        assert running.result().termination_reason == R.CANCELLED

    def test_keeps_the_words_said_so_far(self, peer, long_goal):
        call = peer.send(long_goal)
        call.wait_for_stage("action")
        call.cancel()
        generation = call.result().generation
        assert generation.text
        assert generation.finish_reason == "cancelled"


class TestQueue:
    def test_runs_goals_in_their_order(self, peer, goal):
        calls = [peer.send(goal) for _ in range(3)]
        ends = []
        for index, call in enumerate(calls):
            call.ask_for_result().add_done_callback(lambda _, index=index: ends.append(index))
        peer.wait(lambda: len(ends) == 3, "three results")
        assert ends == [0, 1, 2]

    def test_a_command_goes_before_waiting_goals(self, peer, long_goal, scene):
        before = peer.metrics()
        running = peer.send(long_goal)
        running.wait_for_stage("action")
        long_goal.action_samples, long_goal.denoise_steps = 1, 0
        waiting = [peer.send(long_goal) for _ in range(2)]
        peer.frame(scene.pixels)
        peer.command(scene.command)
        peer.wait(lambda: peer.metrics()["jobs_pending"] == 4, "command")
        assert peer.metrics()["goals_waiting"] == 2
        running.cancel()
        own = running.result().generation.request_id  # "" unless it has ended before it could be cancelled

        def ids() -> list[str]:
            published = [generation.request_id for generation in peer.received["generation"]]
            return [name for name in published if name != own]

        peer.wait(lambda: len(ids()) == 3, "three answers")
        assert [call.result().termination_reason for call in waiting] == [R.COMPLETED] * 2
        assert [name.startswith("command-") for name in ids()] == [True, False, False]
        after = peer.metrics()
        started = [after[name] - before[name] for name in ("driving_started", "goals_started")]
        assert started == [1, 3]

    def test_a_goal_that_does_not_fit_ends_in_an_error(self, peer, long_goal):
        running = peer.send(long_goal)
        running.wait_for_stage("action")
        waiting = [peer.send(long_goal) for _ in range(4)]
        result = peer.plan(long_goal)
        assert result.termination_reason == R.ERROR
        assert result.message == "4 goals wait already (parameter queue_size)"
        values = {pair.key: pair.value for pair in peer.status("plans").values}
        assert values["goals_waiting"] == "4"
        for call in (*waiting, running):
            call.cancel()
        assert {call.result().termination_reason for call in (*waiting, running)} == {R.CANCELLED}

    def test_plan_timeout_ends_running_and_waiting_goals(self, peer, long_goal):
        peer.set_parameter("plan_timeout", 0.5)
        running = peer.send(long_goal)
        running.ask_for_result()
        waiting = peer.send(long_goal)
        waiting.ask_for_result()
        results = [running.result(), waiting.result()]
        peer.set_parameter("plan_timeout", 30.0)
        assert [result.termination_reason for result in results] == [R.TIMEOUT] * 2
        assert results[0].message == "no result within 0.5 s"

    def test_the_compilation_of_a_grammar_counts_into_plan_timeout(self, peer, goal):
        peer.set_parameter("plan_timeout", 0.2)
        goal.sampling.json_schema = LARGE_SCHEMA
        call = peer.send(goal)
        call.ask_for_result()
        result = call.result()
        peer.set_parameter("plan_timeout", 30.0)
        assert (result.termination_reason, result.message) == (R.TIMEOUT, "no result within 0.2 s")
        assert {feedback.stage for feedback in call.feedback} <= {"queued", "grammar"}


def bad_image(**fields):
    def spoil(goal, scene):
        for name, value in fields.items():
            setattr(goal.images[0], name, value)

    return spoil


def bad_sampling(**fields):
    def spoil(goal, scene):
        goal.sampling = SamplingParams(**fields)

    return spoil


def bad_goal(**fields):
    def spoil(goal, scene):
        for name, value in fields.items():
            setattr(goal, name, value)

    return spoil


def truncated(goal, scene):
    goal.images[0].data = goal.images[0].data[:1000]


BAD_GOALS = {
    "empty image": (bad_image(width=0, height=0, step=0, data=b""), "image is empty: 0 x 0 pixels"),
    "no data": (bad_image(data=b""), "image is empty: 320 x 224 pixels, 0 bytes of data"),
    "truncated image": (truncated, "image is truncated: 1000 bytes, expected 224 rows of 960 = 215040"),
    "step too small": (bad_image(step=100), "image step is 100, less than a row of 320 rgb8 pixels (960)"),
    "unknown encoding": (bad_image(encoding="32FC1"), "image encoding '32FC1' is not supported"),
    "10,000 words": (bad_goal(prompt="go to the red box " * 2000), "this engine takes at most"),
    "negative step count": (
        bad_goal(denoise_steps=-1),
        "denoise_steps must be an integer from 0 to 1000 (0 = the checkpoint's default), got -1",
    ),
    "negative samples": (
        bad_goal(action_samples=-1),
        "action_samples must be an integer from 0 to 2147483647 (0 = text only), got -1",
    ),
    "too many samples": (bad_goal(action_samples=1000), "action_samples is 1000; this engine takes at most"),
    "unknown role": (
        bad_goal(earlier_messages=[ChatMessage(role="user"), ChatMessage(role="robot")]),
        "earlier_messages[1]: role must be one of user, assistant, tool, got 'robot'",
    ),
    "tool calls of a user": (
        bad_goal(earlier_messages=[ChatMessage(role="user", tool_calls=[ToolCall(name="a")])]),
        "earlier_messages[0] (user): only an assistant has tool_calls",
    ),
    "arguments that are no object": (
        bad_goal(earlier_messages=[ChatMessage(role="assistant", tool_calls=[ToolCall(name="a")])]),
        "earlier_messages[0]: the arguments of 'a' must be JSON text, got ''",
    ),
    "a tool that is no JSON": (bad_goal(tools=["{}", "{find}"]), "tools[1] must be JSON text, got '{find}'"),
    "a tool that is no object": (bad_goal(tools=["[]"]), "tools[0] must be a JSON object, got '[]'"),
    "empty earlier image": (
        bad_goal(earlier_messages=[ChatMessage(role="user", images=[Image(encoding="rgb8")])]),
        "earlier_messages[0] (user): image is empty: 0 x 0 pixels",
    ),
    "too many images": (
        bad_goal(images=[Image()] * 257),
        "the goal has 257 images, with those of earlier messages, at most 256 are taken (parameter limits",
    ),
    "a state": (bad_goal(state=[1.0]), "this engine is no policy, the request has a state"),
    "unknown adapter": (bad_goal(lora="polite"), "unknown LoRA adapter 'polite'"),
    "sound without a rate": (bad_goal(audio=[AudioChunk(encoding="S16LE")]), "sample_rate must be from 4000"),
    "negative tokens": (
        bad_sampling(max_tokens=-1),
        "max_tokens must be an integer from 0 to 2147483647 (0 = the node",
    ),
    "tiny temperature": (bad_sampling(temperature=1e-9), "temperature must be 0 or a number from 1e-06"),
    "NaN temperature": (bad_sampling(temperature=float("nan")), "temperature must be 0 or a number"),
    "infinite temperature": (bad_sampling(temperature=float("inf")), "temperature must be 0 or a number"),
    "top_p above 1": (bad_sampling(top_p=1.5), "top_p must be a number from 1e-30 to 1"),
    "empty stop string": (bad_sampling(stop=[""]), "stop must be a sequence of non-empty strings"),
}


class TestBadInput:
    @pytest.mark.parametrize("name", BAD_GOALS)
    def test_ends_with_a_clear_error_and_the_node_goes_on(self, peer, goal, scene, name):
        spoil, message = BAD_GOALS[name]
        spoil(goal, scene)
        call = peer.send(goal)
        result = call.result()
        assert result.termination_reason == R.ERROR
        assert message in result.message
        assert call.status == GoalStatus.STATUS_ABORTED
        assert not result.action_chunks
        assert_plans(peer, Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)]))

    def test_no_camera_frame_is_stale_input(self, peer, goal):
        assert peer.transition("deactivate")  # drops the frames of tests before
        assert peer.transition("activate")
        peer.connect()
        goal.images = []
        result = peer.plan(goal)
        assert result.termination_reason == R.STALE_INPUT
        assert "no camera frame has arrived" in result.message

    def test_an_old_frame_is_stale_input(self, peer, goal):
        goal.images[0].header.stamp = Time(sec=peer.now().sec - 10)
        result = peer.plan(goal)
        assert result.termination_reason == R.STALE_INPUT
        assert "limit 3 s (parameter max_input_age)" in result.message

    def test_nan_in_the_odometry_is_named_and_not_used(self, peer, goal):
        peer.odometry(x=float("nan"))
        status = peer.wait(
            lambda: (s := peer.status("inputs")).level == s.ERROR and s, "diagnostics of broken odometry"
        )
        assert status.message.startswith("odometry is not finite: pose.pose.position.x is nan")
        goal.images[0].header.stamp = peer.now()
        result = peer.plan(goal)
        assert result.termination_reason == R.ERROR
        assert result.message == "odometry is not finite: pose.pose.position.x is nan"
        peer.odometry()
        peer.wait(lambda: peer.status("inputs").level != status.level, "diagnostics of good odometry")
        peer.odometry()
        goal.images[0].header.stamp = peer.now()
        assert_plans(peer, goal)
        assert peer.transition("deactivate")  # drops the odometry, which would be stale in later tests
        assert peer.transition("activate")
        peer.connect()

    def test_a_client_that_vanishes_leaves_nothing_but_a_finished_goal(self, node, peer, domain, goal):
        script = (
            "import os, sys, rclpy; sys.path.insert(0, sys.argv[1])\n"
            "from fixtures.peer import RobotPeer, image_message\n"
            "from edgellm_ros.action import Plan; import numpy as np\n"
            "image = image_message(np.zeros((224, 320, 3), np.uint8))\n"
            "peer = RobotPeer(int(os.environ['ROS_DOMAIN_ID']))\n"
            "call = peer.send(Plan.Goal(prompt='go to the red box', images=[image]))\n"
            "call.ask_for_result(); call.wait_for_stage('prefill'); os._exit(9)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(Path(__file__).parents[1])],
            env=ros_environment(domain), timeout=60, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 9, done.stderr
        assert_plans(peer, goal)
        assert node.process.poll() is None
