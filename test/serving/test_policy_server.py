# SPDX-License-Identifier: Apache-2.0
"""The server of openpi's protocol: answers, limits, tokens, clients, mutations."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.openpi.keys import ObservationKeys
from edgellm_ros.openpi.token import read_token
from edgellm_ros.openpi.wire import unpack
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.serving.listening import check_host
from edgellm_ros.serving.policy_service import PolicyService
from fixtures.diffusion_checkpoint import write_diffusion
from fixtures.plain_msgpack import encoded, mutated
from fixtures.served_policy import SlowRuntime, default_keys, served
from fixtures.smolvla_checkpoint import CAMERAS, STATE, write_smolvla

TOKEN = "0123456789abcdef"
IMAGES = {
    f"observation/{name}": np.random.default_rng(index).integers(0, 256, (*size, 3), dtype=np.uint8)
    for index, (name, size) in enumerate(CAMERAS.items())
}
STATE_VALUES = np.linspace(-1, 1, STATE)
OBSERVATION = {**IMAGES, "observation/state": STATE_VALUES, "prompt": "pick it up"}


def client(url: str, **options):
    """Connect as openpi's client does."""
    return connect(url, compression=None, max_size=None, open_timeout=10, **options)


def ask(connection, observation=OBSERVATION):
    connection.send(encoded(observation) if isinstance(observation, dict) else observation)
    answer = connection.recv(10)
    return answer if isinstance(answer, str) else unpack(answer)


@pytest.fixture(scope="module")
def real(act_engine):
    """An ACT behind a server: runtime and URL."""
    with LLMInferenceRuntime(act_engine) as runtime:
        service = PolicyService(runtime, default_keys(runtime.config))
        with served(service) as url:
            yield runtime, url


@pytest.fixture
def slow(act_engine):
    return SlowRuntime(act_engine)


@pytest.fixture
def service(slow):
    return PolicyService(slow, default_keys(slow.config))


class TestAnswers:
    def test_actions_are_those_of_the_runtime(self, real):
        runtime, url = real
        request = LLMGenerationRequest(images=tuple(IMAGES.values()), state=STATE_VALUES)
        with client(url) as connection:
            connection.recv(10)
            answers = [ask(connection), ask(connection)]
        for answer in answers:
            np.testing.assert_array_equal(answer["actions"], runtime.handle_request(request).actions[0])
        assert list(answers[0]["server_timing"]) == ["infer_ms"]
        timing = answers[1]["server_timing"]
        assert timing["infer_ms"] > 0
        assert answers[0]["server_timing"]["infer_ms"] < timing["prev_total_ms"]

    def test_the_first_message_tells_keys_names_and_rate(self, real):
        with client(real[1]) as connection:
            metadata = msgpack.unpackb(connection.recv(10))
        assert metadata["policy"] == "act"
        assert metadata["image_keys"] == {"top": "observation/top", "wrist": "observation/wrist"}
        assert metadata["image_sizes"] == {name: list(size) for name, size in CAMERAS.items()}
        assert (metadata["action_horizon"], metadata["dt"]) == (6, pytest.approx(1 / 30))

    def test_wrong_observations_get_a_line_each_and_the_next_one_is_answered(self, real):
        wrong = {
            b"\xc1": "not a message of openpi's protocol: FormatError",
            encoded({"a": 1}): "no image: expected observation/top",
            encoded({**OBSERVATION, "observation/state": [1.0]}): "state",
            encoded(
                {**OBSERVATION, "observation/top": IMAGES["observation/top"][1:]}
            ): "camera top: the image has",
            "text": "an observation must be a binary message, got a text",
        }
        with client(real[1]) as connection:
            connection.recv(10)
            for message, expected in wrong.items():
                answer = ask(connection, message)
                assert isinstance(answer, str)
                assert expected in answer
                assert "\n" not in answer
                assert "Traceback" not in answer
            assert ask(connection)["actions"].shape == (6, 4)

    def test_a_policy_with_a_task_needs_one(self, tmp_path):
        export(write_smolvla(tmp_path / "checkpoint"), tmp_path / "engine")
        without = encoded({key: value for key, value in OBSERVATION.items() if key != "prompt"})
        with LLMInferenceRuntime(tmp_path / "engine") as runtime:
            keys = default_keys(runtime.config)
            with pytest.raises(ValueError, match="prompt is missing: this policy takes a task in words"):
                PolicyService(runtime, keys).answer(without)
            request = LLMGenerationRequest("tidy", images=tuple(IMAGES.values()), state=STATE_VALUES)
            expected = runtime.handle_request(request).actions[0]
            found = PolicyService(runtime, keys, default_prompt="tidy").answer(without)["actions"]
        np.testing.assert_array_equal(found, expected)

    def test_an_engine_that_is_no_policy_is_refused(self):
        runtime = SimpleNamespace(config=SimpleNamespace(policy=None))
        with pytest.raises(ValueError, match="the engine must be a policy"):
            PolicyService(runtime, ObservationKeys((), (), ()))

    def test_a_policy_that_takes_observations_of_several_times_is_refused(self, tmp_path):
        export(write_diffusion(tmp_path / "checkpoint"), tmp_path / "engine")
        refused = pytest.raises(ValueError, match="takes 2 observations of several times")
        with LLMInferenceRuntime(tmp_path / "engine") as runtime, refused:
            PolicyService(runtime, default_keys(runtime.config))

    def test_an_engine_that_fails_ends_the_connection_with_a_line(self, service, slow):
        with served(service) as url:
            for error, expected in (
                (
                    EngineError("the actions\nare not finite"),
                    "the policy failed: the actions\\nare not finite",
                ),
                (KeyError("secret"), "the policy failed: the server's log says why"),
            ):
                slow.error = error
                with client(url) as connection:
                    connection.recv(10)
                    assert ask(connection) == expected
                    with pytest.raises(ConnectionClosed) as closed:
                        connection.recv(10)
                    assert closed.value.rcvd.code == 1011
            slow.error = None
            with client(url) as connection:
                connection.recv(10)
                assert ask(connection)["actions"].shape == (6, 4)


class TestAccess:
    def test_health_needs_no_token(self, service):
        with served(service, token=TOKEN) as url:
            request = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
            request.request("GET", "/healthz")
            answer = request.getresponse()
            assert (answer.status, answer.read()) == (200, b"OK\n")
            request.close()

    @pytest.mark.parametrize(
        "header",
        [None, "", TOKEN, f"Bearer {TOKEN}", f"Api-Key {TOKEN}x", f"Api-Key {TOKEN[:-1]}", "Api-Key é"],
    )
    def test_a_client_without_the_token_is_refused(self, service, header):
        headers = None if header is None else {"Authorization": header}
        with served(service, token=TOKEN) as url, pytest.raises(InvalidStatus, match="401"):
            client(url, additional_headers=headers)

    def test_a_client_with_the_token_is_answered(self, service):
        headers = {"Authorization": f"Api-Key {TOKEN}"}
        with served(service, token=TOKEN) as url, client(url, additional_headers=headers) as connection:
            connection.recv(10)
            assert ask(connection)["actions"].shape == (6, 4)

    def test_what_is_no_websocket_is_refused_without_a_traceback(self, service, caplog):
        opening = b"GET / HTTP/1.1\r\nHost: x\r\n"
        upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        with served(service) as url:
            address = ("127.0.0.1", urlsplit(url).port)
            for message in (
                b"",
                opening + b"\r\n",
                opening + upgrade + b"\r\n",
                b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n123456789",
                b"\x16\x03\x01" + bytes(100),
                opening + b"x" * 100_000,
            ):
                with socket.create_connection(address, 10) as connection:
                    connection.sendall(message)
            with client(url) as connection:
                connection.recv(10)
                assert ask(connection)["actions"].shape == (6, 4)
        assert not [record for record in caplog.records if record.exc_info]

    def test_two_tokens_are_refused(self, service):
        header = f"Api-Key {TOKEN}"
        with served(service, token=TOKEN) as url, pytest.raises(InvalidStatus, match="401"):
            client(url, additional_headers=[("Authorization", header), ("Authorization", header)])

    def test_a_web_page_cannot_connect(self, service):
        with served(service) as url, pytest.raises(InvalidStatus, match="403"):
            client(url, origin="http://example.com")

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
    def test_this_computer_needs_no_token(self, host):
        check_host(host, "", False)

    def test_other_computers_need_a_token_or_the_users_word(self):
        with pytest.raises(ValueError, match=r"^--host 0\.0\.0\.0: other computers can connect, which needs"):
            check_host("0.0.0.0", "", False)
        check_host("0.0.0.0", TOKEN, False)
        check_host("0.0.0.0", "", True)
        with pytest.raises(ValueError, match=r"^--host 'no such host': "):
            check_host("no such host", TOKEN, False)

    def test_tokens_in_files(self, tmp_path):
        path = tmp_path / "token"
        path.write_text(f"{TOKEN}\n")
        assert read_token(path) == TOKEN
        for content in (b"short\n", b"with spaces in between", b"two-lines-of-16\ncharacters", b"\xff" * 20):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="a token must have at least 16 visible ASCII characters"):
                read_token(path)


class TestLimits:
    def test_a_message_that_is_too_large_ends_its_connection_alone(self, service):
        size = len(encoded(OBSERVATION))
        with served(service, max_message_bytes=size) as url, client(url) as other:
            other.recv(10)
            with client(url) as connection:
                connection.recv(10)
                connection.send(encoded(OBSERVATION) + b"\x00")
                with pytest.raises(ConnectionClosed) as closed:
                    connection.recv(10)
                assert closed.value.rcvd.code == 1009
            assert ask(other)["actions"].shape == (6, 4)

    def test_one_client_too_many_is_refused_until_another_leaves(self, service):
        with served(service, max_clients=2) as url:
            with client(url) as first, client(url) as second:
                first.recv(10)
                second.recv(10)
                with pytest.raises(InvalidStatus, match="503"):
                    client(url)
            for _ in range(100):  # the server learns it a moment later
                try:
                    with client(url):
                        break
                except InvalidStatus:
                    time.sleep(0.01)
            else:
                pytest.fail("the place of a client that left is not free")

    def test_clients_take_turns_and_one_plan_runs_at_a_time(self, service, slow):
        slow.seconds = 0.005

        def plan(number: int) -> None:
            with client(url) as connection:
                connection.recv(10)
                start.wait(10)
                for _ in range(10):
                    answer = ask(connection, {**OBSERVATION, "observation/state": [float(number), 0.0, 0.0]})
                    assert (answer["actions"] == number).all()

        start = threading.Barrier(3)
        with served(service) as url:
            threads = [threading.Thread(target=plan, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
        assert slow.most_running == 1
        assert len(slow.states) == 30
        for end in range(3, 30):
            counts = [slow.states[:end].count(number) for number in range(3)]
            assert max(counts) - min(counts) <= 2

    def test_a_client_that_leaves_while_it_waits_does_not_hold_the_others_up(self, service, slow):
        slow.seconds = 0.2
        with served(service) as url, client(url) as other:
            other.recv(10)
            with client(url) as connection:
                connection.recv(10)
                connection.send(encoded(OBSERVATION))
            assert ask(other)["actions"].shape == (6, 4)


def test_mutated_messages_get_one_answer_each_and_the_server_goes_on(service):
    rng = np.random.default_rng(0)
    small = {f"observation/{name}": np.zeros((2, 2, 3), np.uint8) for name in CAMERAS}
    good = encoded(
        {**small, "observation/state": STATE_VALUES, "prompt": "go", "more": {"list": [1, None, 2.5]}}
    )
    answered, lines = 0, set()
    with served(service) as url, client(url) as connection:
        connection.recv(10)
        for _ in range(3000):
            answer = ask(connection, mutated(good, rng))
            if isinstance(answer, str):
                assert 5 < len(answer) < 600
                assert answer.isprintable(), answer
                assert "Traceback" not in answer
                lines.add(answer)
            else:
                answered += 1
                assert answer["actions"].shape == (6, 4)
        assert ask(connection, good)["actions"].shape == (6, 4)
    assert 100 < answered < 1500
    assert len(lines) > 100
