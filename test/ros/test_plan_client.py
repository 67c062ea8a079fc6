# SPDX-License-Identifier: Apache-2.0
"""PlanClient from threads, callbacks and asyncio, through the real action."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
import rclpy
import soundfile
from edgellm_ros.action import Plan
from edgellm_ros.msg import (
    ActionChunk,
    AudioChunk,
    ChatMessage,
    Generation,
    PreviousChunk,
    SamplingParams,
    ToolCall,
)
from rclpy.action import ActionServer, GoalResponse
from rclpy.executors import SingleThreadedExecutor
from sensor_msgs.msg import CompressedImage

from edgellm_ros.client import PlanCall, PlanClient, PlanError, PlanResult
from edgellm_ros.ros.client.goal import make_goal
from edgellm_ros.ros.processes import ros_environment
from fixtures.peer import image_message

LONG = {"action_samples": 16, "denoise_steps": 1000}  # keeps the action head busy for seconds


@pytest.fixture(scope="module")
def user(domain):
    """A node of the user's in a context of its own, which no executor spins."""
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=domain)
    node = rclpy.create_node("user", context=context)
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


@pytest.fixture(scope="module")
def client(node, user):
    with PlanClient(user, connect_timeout_s=30.0) as client:
        yield client


class TestPlan:
    def test_gives_what_a_plain_action_client_gets(self, peer, client, scene):
        arguments = {"action_samples": 2, "noise_seed": 7, "max_tokens": 50}
        result = client.plan(scene.command, images=scene.pixels, **arguments)
        goal = Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)])
        goal.action_samples, goal.noise_seed, goal.sampling.max_tokens = 2, 7, 50
        expected = peer.plan(goal)
        assert result.text == expected.generation.text
        assert (result.termination_reason, result.message) == ("completed", "")
        assert result.actions.shape == (2, 40, 2)
        assert result.paths.shape == (2, 41, 3)
        for actions, states, chunk, path in zip(
            result.actions, result.paths, expected.action_chunks, expected.paths, strict=True
        ):
            np.testing.assert_array_equal(actions.ravel(), np.float32(chunk.values))
            np.testing.assert_array_equal(
                states[:, :2], [(pose.pose.position.x, pose.pose.position.y) for pose in path.poses]
            )
            sine = [pose.pose.orientation.z for pose in path.poses]
            np.testing.assert_allclose(np.sin(states[:, 2] / 2), sine, atol=1e-12)
        assert result.reply.generation.token_ids == expected.generation.token_ids

    def test_has_no_trajectories_when_the_answer_is_words_only(self, client, scene):
        result = client.plan(scene.command, images=scene.pixels, action_samples=0)
        assert (result.actions, result.paths) == (None, None)

    def test_remembers_earlier_messages(self, client, scene):
        earlier = [("user", "what do you see?", scene.pixels), ("assistant", "a red box")]
        alone = client.plan(scene.command, images=scene.pixels, action_samples=0)
        told = client.plan(scene.command, images=scene.pixels, earlier_messages=earlier, action_samples=0)
        assert told.reply.generation.prompt_token_count > alone.reply.generation.prompt_token_count + 80

    def test_cancels_the_goal_after_its_timeout(self, peer, client, scene):
        cancelled = peer.metrics()["plans_cancelled"]
        with pytest.raises(TimeoutError, match=r"^no result of /edgellm/plan within 0\.5 s$"):
            client.plan(scene.command, images=scene.pixels, timeout_s=0.5, **LONG)
        peer.wait(lambda: peer.metrics()["plans_cancelled"] == cancelled + 1, "cancelled plan")

    def test_raises_what_the_node_answers_with_the_result(self, client, scene):
        with pytest.raises(
            PlanError, match=r"^/edgellm/plan: error: unknown LoRA adapter 'unknown'.*$"
        ) as raised:
            client.plan(scene.command, images=scene.pixels, lora="unknown")
        assert raised.value.result.termination_reason == "error"

    def test_blocks_in_a_callback_of_the_users_single_threaded_executor(self, client, user, scene):
        answers = []
        executor = SingleThreadedExecutor(context=user.context)
        executor.add_node(user)
        timer = user.create_timer(
            0.01, lambda: answers.append(client.plan(scene.command, images=scene.pixels, timeout_s=30.0))
        )
        while not answers:
            executor.spin_once(timeout_sec=1.0)
        user.destroy_timer(timer)
        executor.remove_node(user)
        executor.shutdown()
        assert answers[0].termination_reason == "completed"

    def test_serves_several_threads_at_once(self, client, scene):
        with ThreadPoolExecutor(4) as pool:
            plans = [pool.submit(client.plan, scene.command, images=scene.pixels) for _ in range(4)]
            assert len({plan.result().text for plan in plans}) == 1

    def test_works_without_a_node_of_the_user(self, node, domain, scene, monkeypatch):
        monkeypatch.setenv("ROS_DOMAIN_ID", str(domain))
        with PlanClient() as client:
            assert client.plan(scene.command, images=scene.pixels).text


class TestStream:
    def test_gives_the_words_piece_by_piece(self, client, scene):
        call = client.stream(scene.command, images=scene.pixels)
        progress = list(call)
        assert "".join(one.new_text for one in progress) == call.result().text
        assert progress[-1].text == call.result().text
        assert len({one.text for one in progress}) > 2
        assert progress[-1].tokens == call.result().reply.generation.token_count

    def test_gives_the_words_whose_feedback_is_lost(self):
        call = PlanCall("/edgellm/plan", request_cancel=lambda call: None)
        call.on_feedback(Plan.Feedback(text="a red", tokens=2, stage="decode"))
        reply = Plan.Result(termination_reason="completed", generation=Generation(text="a red box"))
        call.end(reply)
        assert [progress.new_text for progress in call] == ["a red", " box"]

    def test_ends_with_the_words_so_far_when_it_is_cancelled(self, client, scene):
        call = client.stream(scene.command, images=scene.pixels, **LONG)
        for progress in call:
            if progress.stage == "action":
                call.cancel()
        result = call.result()
        assert (result.termination_reason, result.message) == ("cancelled", "cancelled by the client")
        assert result.text == progress.text != ""

    def test_leaving_its_context_cancels_it(self, client, scene):
        with client.stream(scene.command, images=scene.pixels, **LONG) as call:
            next(iter(call))
        assert call.result(timeout_s=20.0).termination_reason == "cancelled"

    def test_raises_the_error_of_the_plan_at_its_end(self, client, scene):
        with pytest.raises(PlanError, match="unknown LoRA adapter"):
            list(client.stream(scene.command, images=scene.pixels, lora="unknown"))


class TestAsyncio:
    def test_plans_run_beside_other_tasks(self, client, scene):
        async def both():
            plan = client.plan_async(scene.command, images=scene.pixels)
            return (await asyncio.gather(plan, asyncio.sleep(0, "other")))[0]

        assert asyncio.run(both()).text == client.plan(scene.command, images=scene.pixels).text

    def test_progress_is_iterated_asynchronously(self, client, scene):
        async def words():
            call = client.stream(scene.command, images=scene.pixels)
            pieces = [progress.new_text async for progress in call]
            return "".join(pieces), (await call).text

        said, text = asyncio.run(words())
        assert said == text != ""

    def test_waiting_without_an_asyncio_loop_is_refused(self):
        call = PlanCall("/edgellm/plan", request_cancel=lambda call: None)
        with pytest.raises(RuntimeError, match="no asyncio loop runs here"):
            call.__await__().send(None)

    def test_cancelling_the_task_cancels_the_goal(self, peer, client, scene):
        async def timed_out():
            await asyncio.wait_for(client.plan_async(scene.command, images=scene.pixels, **LONG), 0.5)

        cancelled = peer.metrics()["plans_cancelled"]
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(timed_out())
        peer.wait(lambda: peer.metrics()["plans_cancelled"] == cancelled + 1, "cancelled plan")


class TestEnd:
    @pytest.mark.parametrize("user", ["", "rclpy.init(); node = rclpy.create_node('user')"])
    def test_a_program_that_does_not_close_its_client_ends_cleanly(self, domain, user):
        code = f"""
            import rclpy
            from edgellm_ros.client import PlanClient
            node = None
            {user}
            client = PlanClient(node, name="/missing")
            call = client.stream("go")
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=ros_environment(domain), capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    def test_clients_of_several_threads_have_loaded_all_types(self, domain):
        code = """
            import threading, time
            from edgellm_ros.client import PlanClient
            from edgellm_ros.msg import ChatMessage

            types, loaded = type(ChatMessage), []
            load = types.__import_type_support__

            def load_slowly():
                time.sleep(0.5)
                load()

            def make():
                with PlanClient(name="/missing"):
                    loaded.append(types._TYPE_SUPPORT is not None)

            types.__import_type_support__ = load_slowly
            threads = [threading.Thread(target=make) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert loaded == [True] * 4, loaded
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=ros_environment(domain), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_client_without_a_reference_ends_its_thread(self, user):
        before = set(threading.enumerate())
        client = PlanClient(user, name="/missing")
        (thread,) = set(threading.enumerate()) - before
        del client
        gc.collect()
        assert not thread.is_alive()


class TestErrors:
    def test_no_node_within_the_timeout_is_one_line(self, user):
        with (
            PlanClient(user, name="/missing", connect_timeout_s=0.3) as client,
            pytest.raises(PlanError, match=r"^/missing/plan: no server of this action within 0\.3 s; .*$"),
        ):
            client.plan("go")

    def test_a_plan_that_waits_for_a_node_can_be_cancelled(self, user):
        with PlanClient(user, name="/missing") as client:
            call = client.stream("go")
            call.cancel()
            assert call.result(timeout_s=5.0).message == "cancelled before it was sent"

    def test_closing_the_client_ends_its_plans(self, user):
        client = PlanClient(user, name="/missing")
        call = client.stream("go")
        client.close()
        for wait in (call.result, lambda: client.plan("go")):
            with pytest.raises(PlanError, match=r"^/missing/plan: the client was closed$"):
                wait()

    def test_shutting_ros_down_ends_its_plans(self, domain):
        context = rclpy.Context()
        rclpy.init(context=context, domain_id=domain)
        call = PlanClient(user := rclpy.create_node("user", context=context), name="/missing").stream("go")
        rclpy.shutdown(context=context)
        with pytest.raises(PlanError, match=r"^/missing/plan: (ROS was shut down|the client was closed)$"):
            call.result(timeout_s=5.0)
        user.destroy_node()

    def test_a_rejected_goal_is_one_line(self, user, other_server):
        other_server(goal_callback=lambda goal: GoalResponse.REJECT)
        with (
            PlanClient(user, name="/other") as client,
            pytest.raises(PlanError, match=r"^/other/plan: the goal was rejected$"),
        ):
            client.plan("go")

    def test_a_prompt_that_is_not_unicode_fails_alone(self, user, other_server):
        other_server()
        with PlanClient(user, name="/other") as client:
            waiting = client.stream("go")
            with pytest.raises(PlanError, match=r"^/other/plan: the goal cannot be sent: .*surrogates"):
                client.plan("\ud800")
            with pytest.raises(PlanError, match=r"^/other/plan: : $"):
                waiting.result(timeout_s=10.0)

    def test_a_result_that_cannot_be_used_is_one_line(self, user, other_server):
        chunk = ActionChunk(horizon=3, names=["curvature"], values=[0.0])
        other_server(lambda handle: handle.succeed() or Plan.Result(action_chunks=[chunk]))
        with (
            PlanClient(user, name="/other") as client,
            pytest.raises(PlanError, match=r"^/other/plan: the result cannot be used: .*\(3,1\)$"),
        ):
            client.plan("go")

    def test_a_goal_whose_answer_is_lost_is_planned_once(self, user, other_server, monkeypatch):
        monkeypatch.setattr("edgellm_ros.ros.client.action_thread.RESEND_S", 0.2)
        goals = []

        def execute(handle):
            goals.append(handle.request.prompt)
            handle.succeed()
            return Plan.Result(termination_reason=Plan.Result.COMPLETED)

        other_server(execute_callback=execute)
        with PlanClient(user, name="/other") as client:
            services, sent = client._thread._services, []
            send = services.send_goal

            def send_goal(goal_id, goal):
                sent.append(send(goal_id, goal))
                return sent[-1] if len(sent) > 1 else rclpy.task.Future()  # the first answer does not come

            monkeypatch.setattr(services, "send_goal", send_goal)
            assert client.plan("go", timeout_s=10.0).termination_reason == "completed"
        assert len(sent) > 1
        assert goals == ["go"]

    def test_feedback_is_taken_by_streams_alone(self, user, other_server, monkeypatch):
        taken, server_side = [], []

        def execute(handle):
            handle.publish_feedback(Plan.Feedback(text="a", tokens=1, stage="decode"))
            server_side.append(handle.request.prompt)
            time.sleep(0.3)  # the feedback would arrive before the result
            handle.succeed()
            return Plan.Result(termination_reason=Plan.Result.COMPLETED)

        monkeypatch.setattr(PlanCall, "on_feedback", lambda call, feedback: taken.append(feedback.text))
        other_server(execute_callback=execute)
        with PlanClient(user, name="/other") as client:
            client.plan("plan", timeout_s=10.0)
            asyncio.run(client.plan_async("async"))
            assert (server_side, taken) == (["plan", "async"], [])
            client.stream("stream").result(timeout_s=10.0)
            assert taken == ["a"]

    def test_statuses_of_goals_are_not_read(self, user, other_server):
        other_server()
        with PlanClient(user, name="/other") as client:
            hidden = client._thread._node
            topics = hidden.get_subscriber_names_and_types_by_node(hidden.get_name(), hidden.get_namespace())
        assert "/other/plan/_action/feedback" in dict(topics)
        assert "/other/plan/_action/status" not in dict(topics)

    def test_a_node_that_disappears_is_one_line(self, user, other_server, monkeypatch):
        monkeypatch.setattr("edgellm_ros.ros.client.action_thread.GONE_S", 0.3)

        async def never(handle):
            await rclpy.task.Future()

        stop = other_server(execute_callback=never)
        with PlanClient(user, name="/other") as client:
            call = client.stream("go")
            while not client._thread._sent[call].accepted:  # the answer to the goal is under way
                time.sleep(0.01)
            stop()
            with pytest.raises(PlanError, match=r"^/other/plan: the node went away before the result$"):
                call.result(timeout_s=10.0)

    def test_a_deactivated_node_is_one_line(self, peer, client, scene):
        assert peer.transition("deactivate")
        try:
            with pytest.raises(PlanError, match=r"^/edgellm/plan: error: the node is not active$"):
                client.plan(scene.command, images=scene.pixels)
        finally:
            assert peer.transition("activate")

    def test_deactivating_the_node_ends_a_plan_with_its_words(self, peer, client, scene):
        call = client.stream(scene.command, images=scene.pixels, **LONG)
        next(progress for progress in call if progress.stage == "action")
        assert peer.transition("deactivate")
        try:
            with pytest.raises(
                PlanError, match=r"^/edgellm/plan: preempted: the node was deactivated$"
            ) as raised:
                call.result(timeout_s=20.0)
            assert raised.value.result.text
        finally:
            assert peer.transition("activate")


@pytest.fixture
def other_server(user):
    """`other_server(execute_callback=..., ...)` serves /other/plan; returns its stop.

    Further arguments, such as `goal_callback`, are those of the action server.
    """
    node = rclpy.create_node("other", context=user.context)
    executor = SingleThreadedExecutor(context=user.context)
    executor.add_node(node)
    running = [True]
    servers = []

    def spin():
        while running:
            executor.spin_once(timeout_sec=0.1)

    thread = threading.Thread(target=spin)

    def start(execute_callback=lambda handle: Plan.Result(), **callbacks):
        servers.append(
            ActionServer(node, Plan, "/other/plan", execute_callback=execute_callback, **callbacks)
        )
        thread.start()
        return stop

    def stop():
        if running:
            running.clear()
            thread.join()
            executor.shutdown()
            for server in servers:
                server.destroy()
            node.destroy_node()

    yield start
    stop()


class TestGoal:
    """What becomes of the arguments; needs no node."""

    def test_an_unknown_argument_is_refused_with_the_name_that_was_meant(self):
        with pytest.raises(
            TypeError, match=r"^a plan has no argument 'action_sample'; did you mean 'action_samples'\?$"
        ):
            make_goal("go", action_sample=4)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"action_samples": 1.5}, "^action_samples: The .* field must be of type 'int', got 1.5$"),
            ({"noise_seed": 2**63}, "^noise_seed: The .* field must be an integer in"),
            ({"seed": "x"}, "^seed: The .* field must be of type 'int', got 'x'$"),
            ({"temperature": "warm"}, "could not convert string to float"),
            ({"earlier_messages": ["hello"]}, r"earlier_messages\[0\] must be \(role, text\)"),
            ({"earlier_messages": [("user", 1)]}, "field must be of type 'str'"),
            ({"audio": 5}, "audio must be .* got int"),
            ({"state": [[1.0, 2.0]]}, "^state: The .* field must be .* 'float'"),
            ({"state": "home"}, "could not convert string to float"),
            ({"previous_chunk": 5}, 'previous_chunk must be "off", a PreviousChunk or its .* got int'),
            ({"previous_chunk": {"delay": 1.5}}, "^previous_chunk: The 'delay' field must be of type 'int'"),
            ({"previous_chunk": {"late": 1}}, "^previous_chunk: Invalid arguments .* late"),
        ],
    )  # fmt: skip
    def test_a_value_of_the_wrong_type_is_refused(self, arguments, message):
        with pytest.raises((TypeError, ValueError), match=message):
            make_goal("go", **arguments)

    @pytest.mark.parametrize(
        "name",
        [
            *Plan.Goal.get_fields_and_field_types(),
            *SamplingParams.get_fields_and_field_types(),
        ],
    )
    def test_none_is_the_default_of_every_argument(self, name):
        given = {"prompt": "go", name: None}
        expected = make_goal("" if name == "prompt" else "go")
        assert make_goal(**given) == expected

    def test_none_is_a_default_within_messages_and_chunks_too(self):
        earlier = make_goal("go", earlier_messages=[("user", "hello", None)]).earlier_messages
        assert list(earlier) == [ChatMessage(role="user", text="hello")]
        chunk = make_goal("go", previous_chunk={"chunk": None, "delay": 3, "horizon": None}).previous_chunk
        assert list(chunk) == [PreviousChunk(form="guided", delay=3)]

    def test_an_unknown_argument_that_is_none_is_refused_too(self):
        with pytest.raises(TypeError, match="did you mean 'action_samples'"):
            make_goal("go", action_sample=None)

    def test_numbers_of_numpy_are_numbers(self):
        goal = make_goal("go", noise_seed=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(4))
        assert (goal.noise_seed, goal.sampling.temperature, goal.sampling.top_k) == (3, 0.5, 4)

    def test_a_state_may_be_an_array(self):
        for state in (np.array([1, 2], np.float32), [1, 2], (1.0, 2.0)):
            assert list(make_goal("go", state=state).state) == [1.0, 2.0]

    def test_a_json_schema_may_be_a_mapping(self):
        goal = make_goal("go", json_schema={"type": "object"})
        assert goal.sampling.json_schema == '{"type": "object"}'
        assert make_goal("go", json_schema='{"a": 1}').sampling.json_schema == '{"a": 1}'
        assert make_goal("go", choices=["left", "right"]).sampling.choices == ["left", "right"]

    def test_tools_may_be_mappings_or_text(self):
        assert make_goal("go", tools=[{"type": "function"}, "{}"]).tools == ['{"type": "function"}', "{}"]
        assert make_goal("go", tools={"a": 1}).tools == ['{"a": 1}']
        with pytest.raises(TypeError, match=r"^tools\[1\] is not JSON: Object of type set"):
            make_goal("go", tools=[{}, {"a": {1}}])

    def test_the_reply_to_a_plan_may_be_an_earlier_message(self):
        call = ToolCall(name="find", arguments='{"what": "box"}')
        said = Generation(text="I look. <tool_call>...", content="I look.", tool_calls=[call])
        reply = Plan.Result(generation=said)
        (said, result) = make_goal("", earlier_messages=[reply, ("tool", "on the left")]).earlier_messages
        assert (said.role, said.text, said.tool_calls) == ("assistant", "I look.", [call])
        assert (result.role, result.text) == ("tool", "on the left")
        found = PlanResult.from_reply(reply)
        assert [(call.name, call.arguments) for call in found.tool_calls] == [("find", {"what": "box"})]
        assert found.content == "I look."

    def test_images_may_be_arrays_files_and_messages(self, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
        path = tmp_path / "frame.png"
        cv2.imwrite(str(path), pixels[..., ::-1])
        compressed = CompressedImage(format="png", data=path.read_bytes())
        goal = make_goal("go", images=[pixels, path, os.fspath(path), image_message(pixels), compressed])
        for image in goal.images:
            assert (image.encoding, image.height, image.width, bytes(image.data)) == (
                "rgb8", 4, 6, pixels.tobytes(),
            )  # fmt: skip

    @pytest.mark.parametrize("as_file", [True, False])
    def test_a_jpeg_that_is_damaged_inside_is_refused(self, tmp_path, as_file):
        picture = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
        data = cv2.imencode(".jpg", picture)[1].tobytes()
        data = data[: len(data) // 2] + bytes(len(data) // 2) + b"\xff\xd9"
        (tmp_path / "frame.jpg").write_bytes(data)
        image = tmp_path / "frame.jpg" if as_file else CompressedImage(format="jpeg", data=data)
        with pytest.raises(ValueError, match=r"cannot be decoded.*Corrupt JPEG data"):
            make_goal("go", images=image)

    def test_an_image_of_another_type_is_refused(self):
        with pytest.raises(ValueError, match=r"must be a uint8 array .* got float32 \[4, 6, 3\]"):
            make_goal("go", images=np.zeros((4, 6, 3), np.float32))

    def test_a_sound_may_be_an_array_a_file_or_messages(self, tmp_path):
        samples = np.float32([0.0, 0.5, -0.25, 1.0] * 100)
        path = tmp_path / "speech.wav"
        soundfile.write(path, samples, 16000, subtype="FLOAT")
        (chunk,) = make_goal(audio=(samples, 16000)).audio
        assert (chunk.encoding, chunk.sample_rate, chunk.channels) == ("F32LE", 16000, 1)
        assert bytes(chunk.data) == samples.tobytes()
        for audio in (path, chunk, [chunk], (samples.astype(np.float64), 16000)):
            assert make_goal(audio=audio).audio == [chunk]

    def test_a_previous_chunk_may_be_the_result_of_a_plan(self):
        values = {"names": ["a", "b"], "values": [1.0, 2.0]}
        chunks = [ActionChunk(horizon=1, sample_index=i, **values) for i in range(2)]
        before = PlanResult.from_reply(Plan.Result(action_chunks=chunks))
        (previous,) = make_goal("go", previous_chunk={"chunk": before, "delay": 3}).previous_chunk
        assert (previous.chunk, previous.delay, previous.form) == (chunks[0], 3, "guided")
        assert make_goal("go", previous_chunk=previous).previous_chunk == [previous]
        assert make_goal("go", previous_chunk="off").previous_chunk[0].form == "off"
        words = PlanResult.from_reply(Plan.Result())
        with pytest.raises(ValueError, match="chunk is the result of a plan without actions"):
            make_goal("go", previous_chunk={"chunk": words})

    def test_earlier_messages_may_be_tuples_or_messages(self):
        pixels = np.zeros((4, 6, 3), np.uint8)
        said = ChatMessage(role="assistant", text="a box")
        goal = make_goal("go there", earlier_messages=[("user", "what is there?", pixels), said])
        assert [(m.role, m.text, len(m.images)) for m in goal.earlier_messages] == [
            ("user", "what is there?", 1), ("assistant", "a box", 0),
        ]  # fmt: skip

    def test_several_chunks_are_one_sound(self):
        chunks = [AudioChunk(encoding="S16LE", sample_rate=16000, data=b"\0\0") for _ in range(2)]
        assert make_goal(audio=chunks).audio == chunks
