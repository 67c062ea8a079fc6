# SPDX-License-Identifier: Apache-2.0
"""Several clients at a time: that leave, that read slowly, that are too many."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import openai
import pytest

from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.serving.openai import background, server
from fixtures.mutated_http import Request, send
from fixtures.served_openai import MODEL, ScriptedRuntime, client, serving

CHAT = "/v1/chat/completions"


@pytest.fixture
def runtime(tiny_engine):
    return ScriptedRuntime(tiny_engine)


@pytest.fixture
def serve(runtime):
    """`with serve(...) as port`."""

    @contextmanager
    def run(**options):
        with serving(runtime, **options) as port:
            yield port

    return run


def body(text: str, **options) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **options}).encode()


def ask(port: int, text: str, **options) -> dict:
    status, answer = send(port, Request(CHAT, body(text, **options)).raw())
    assert status == 200, answer
    return json.loads(answer)


def said(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def wait_until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it did not happen within 5 s")


@contextmanager
def begun(port: int, text: str, receive_buffer: int = 0, **options):
    """Yield the answer to a request as a file; at the end the client leaves."""
    with socket.socket() as connection:
        connection.settimeout(10)
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", port))
        connection.sendall(Request(CHAT, body(text, **options)).raw())
        with connection.makefile("rb") as answer:
            yield answer


def received(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes the connection, in either way."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


class TestClientsThatLeave:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_ends_its_own_request_alone(self, runtime, serve, stream):
        runtime.go.clear()
        with serve() as port:
            with begun(port, "first one", stream=stream) as answer:
                wait_until(lambda: runtime.begun)
                if stream:
                    while b"first" not in answer.readline():
                        pass
                other = threading.Thread(target=lambda: texts.append(said(ask(port, "second one"))))
                texts: list[str] = []
                other.start()
            wait_until(lambda: runtime.cancelled == ["first one"])
            runtime.go.set()
            other.join(10)
            metrics = send(port, Request("/metrics", b"", "GET").raw())[1].decode()
        assert texts == ["second one"]
        assert runtime.answered == ["second one"]
        assert "edgellm_clients_left_total 1.0" in metrics
        assert "edgellm_requests_running 0.0" in metrics

    def test_a_request_whose_client_leaves_before_its_turn_is_never_begun(self, runtime, serve):
        runtime.go.clear()
        with serve() as port, begun(port, "first one"):
            wait_until(lambda: runtime.begun)
            with begun(port, "second one"):
                pass
            with begun(port, "third one") as answer:
                time.sleep(0.05)  # the server learns that the second has left
                runtime.go.set()
                assert b"third one" in answer.read()
        assert runtime.begun == ["first one", "third one"]

    def test_all_choices_of_a_client_that_leaves_end(self, runtime, serve):
        runtime.go.clear()
        with serve() as port:
            with begun(port, "first one", n=4):
                wait_until(lambda: runtime.begun)
            wait_until(lambda: runtime.cancelled)
            runtime.go.set()
            assert said(ask(port, "next")) == "next"
        assert runtime.begun == ["first one", "next"]

    def test_openai_s_client_closes_a_stream_in_the_middle(self, runtime, serve):
        runtime.go.clear()
        with serve() as port, client(port) as made:
            messages = [{"role": "user", "content": "one two three"}]
            stream = made.chat.completions.create(model=MODEL, messages=messages, stream=True)
            next(iter(stream))
            stream.close()
            wait_until(lambda: runtime.cancelled == ["one two three"])


class TestSlowReaders:
    LONG = " ".join(["x"] * 80)
    WORD = "x" * 100_000  # in place of each: more than the buffers of a connection

    @pytest.fixture(autouse=True)
    def long_answers(self, runtime):
        runtime.says["x"] = self.WORD

    def test_a_slow_reader_holds_no_other_up_and_gets_its_whole_answer(self, runtime, serve):
        with serve() as port, begun(port, self.LONG, receive_buffer=4096, stream=True) as answer:
            wait_until(lambda: runtime.answered)
            for text in ("a b", "c d"):
                assert said(ask(port, text)) == text
            assert _running(port) == 1
            lines = answer.read().split(b"\r\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b'data: {"')]
        assert "".join(
            event["choices"][0]["delta"].get("content", "") for event in events
        ) == self.LONG.replace("x", self.WORD)

    def test_a_client_that_reads_nothing_is_disconnected(self, runtime, serve):
        with serve(stall_s=0.2) as port, begun(port, self.LONG, receive_buffer=4096, stream=True) as answer:
            wait_until(lambda: runtime.answered)
            wait_until(lambda: _metric(port, "edgellm_clients_left_total") == 1)
            assert _metric(port, "edgellm_requests_running") == 0
            rest = b""
            with suppress(ConnectionResetError):
                rest = answer.read()
        assert b"[DONE]" not in rest

    def test_a_client_that_reads_nothing_does_not_hold_up_the_end_of_the_server(self, runtime, serve):
        with ExitStack() as stack:
            with serve() as port:
                stack.enter_context(begun(port, self.LONG, receive_buffer=4096, stream=True))
                wait_until(lambda: runtime.answered)
                began = time.monotonic()
            assert time.monotonic() - began < background.STOP_S + 1

    def test_half_a_head_is_closed_and_half_a_body_answered(self, serve, monkeypatch):
        monkeypatch.setattr(server, "HEAD_S", 0.1)
        half = Request(CHAT, body("a"), lines=("Content-Length: 500",)).raw()
        with serve(body_s=0.1) as port:
            for sent, expected in (
                (b"", b""),
                (b"POST / HTTP/1.1\r\nHost: x\r\n", b""),
                (half, b"body: it was not there within 0.1 s"),
            ):
                with socket.create_connection(("127.0.0.1", port), 10) as connection:
                    connection.sendall(sent)
                    assert expected in received(connection)
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = b""
                while b'{"status": "ok"}' not in answer:
                    answer += connection.recv(65536)
                connection.sendall(b"GET /")
                assert received(connection) == b""


class TestLimits:
    def test_one_request_too_many_is_refused_until_another_ends(self, runtime, serve):
        runtime.go.clear()
        with serve(max_requests=2) as port, client(port) as made:
            with begun(port, "first one"), begun(port, "second one", stream=True):
                wait_until(lambda: _running(port) == 2)
                with pytest.raises(openai.RateLimitError) as refused:
                    made.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
                assert refused.value.response.headers["retry-after"] == "1"
                assert send(port, Request("/health", b"", "GET").raw())[0] == 200
            wait_until(lambda: _running(port) == 0)
            runtime.go.set()
            assert said(ask(port, "third one")) == "third one"

    def test_connections_are_limited(self, serve, monkeypatch):
        monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
        with serve() as port:
            held = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(3)]
            for each in reversed(held):
                with suppress(ConnectionError):
                    each.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert [b"200 OK" in received(each) for each in held] == [True, True, False]
            for each in held:
                each.close()


def _metric(port: int, name: str) -> float:
    text = send(port, Request("/metrics", b"", "GET").raw())[1].decode()
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


def _running(port: int) -> int:
    return int(_metric(port, "edgellm_requests_running"))


class TestFailures:
    def test_an_engine_that_fails_ends_its_request_alone(self, runtime, serve, caplog):
        caplog.set_level(logging.ERROR)
        with serve() as port, client(port) as made:
            for error, message in (
                (EngineError("the logits\nare not finite"), "the engine failed: the logits"),
                (KeyError("secret"), "the server's log says why"),
            ):
                runtime.error = error
                messages = [{"role": "user", "content": "one two"}]
                with pytest.raises(openai.InternalServerError, match=message) as failed:
                    made.chat.completions.create(model=MODEL, messages=messages)
                assert "secret" not in str(failed.value)
                stream = made.chat.completions.create(model=MODEL, messages=messages, stream=True)
                with pytest.raises(openai.APIError, match=message):
                    list(stream)
            runtime.error = None
            assert said(ask(port, "next")) == "next"
            assert send(port, Request("/health", b"", "GET").raw())[0] == 200

    def test_a_lost_device_is_no_good_health(self, runtime, serve):
        runtime.error = DeviceLostError("gone")
        with serve() as port:
            assert send(port, Request(CHAT, body("a")).raw())[0] == 500
            assert send(port, Request("/health", b"", "GET").raw())[0] == 503

    def test_requests_that_wait_when_the_server_stops_are_told(self, runtime, serve):
        runtime.go.clear()
        answers: list[tuple[int, bytes]] = []
        with serve() as port:
            request = Request(CHAT, body("first one")).raw()
            threads = [threading.Thread(target=lambda: answers.append(send(port, request))) for _ in range(2)]
            for thread in threads:
                thread.start()
            wait_until(lambda: _running(port) == 2)
        for thread in threads:
            thread.join(10)
        assert [status for status, _ in answers] == [503, 503]
        assert b"the server stops" in answers[0][1]
        assert runtime.answered == []

    def test_a_stream_ends_when_the_server_stops(self, runtime, serve, caplog):
        runtime.go.clear()
        with ExitStack() as stack:
            with serve() as port:
                answer = stack.enter_context(begun(port, "first one", stream=True))
                while b"first" not in answer.readline():
                    pass
            rest = b""
            with suppress(ConnectionResetError):
                rest = answer.read()
        assert b"[DONE]" not in rest
        assert runtime.cancelled == ["first one"]
        assert not [record for record in caplog.records if record.exc_info]


def test_metrics_count_tokens_times_and_statuses(runtime, serve):
    with serve() as port:
        ask(port, "one two three")
        ask(port, "four five", n=2)
        send(port, Request(CHAT, b"{}").raw())
        text = send(port, Request("/metrics", b"", "GET").raw())[1].decode()
    for line in (
        f'edgellm_requests_total{{endpoint="{CHAT}",status="200"}} 2.0',
        f'edgellm_requests_total{{endpoint="{CHAT}",status="400"}} 1.0',
        "edgellm_generated_tokens_total 7.0",
        "edgellm_prompt_tokens_total 21.0",
        "edgellm_time_to_first_token_seconds_count 3.0",
        "edgellm_request_duration_seconds_count 3.0",
    ):
        assert line in text.splitlines(), line
