# SPDX-License-Identifier: Apache-2.0
"""The client of openpi's protocol, beside servers that answer well, late or badly."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.openpi.client import PolicyClient
from fixtures.openpi_server import ACTIONS, Server, running
from fixtures.plain_msgpack import encoded

TOKEN = "0123456789abcdef"
OBSERVATION = {"observation/image": np.zeros((2, 2, 3), np.uint8), "prompt": "go"}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with running(server) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[PolicyClient]:
    client = PolicyClient(url, timeout_s=1.0)
    yield client
    client.close()


def test_actions_and_observations_pass(client, server):
    for _ in range(2):
        np.testing.assert_array_equal(client.infer(OBSERVATION), ACTIONS)
    assert server.connections == 1
    np.testing.assert_array_equal(server.received[0]["observation/image"], OBSERVATION["observation/image"])
    assert server.received[0]["prompt"] == "go"
    assert server.authorization is None


def test_the_token_is_sent_as_openpis_client_sends_it(url, server):
    client = PolicyClient(url, token=TOKEN)
    assert client.connect() == {"name": "other"}
    client.close()
    assert server.authorization == f"Api-Key {TOKEN}"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("Traceback ...\n  line\nKeyError: 'image'\n", "the server says: KeyError: 'image'$"),
        (b"\xc1", "not a message of openpi's protocol"),
        (encoded([]), r"must have actions \[T, A\] of numbers, got none"),
        (encoded({"actions": [[1.0]]}), "got none"),
        (encoded({"actions": np.zeros(3)}), r"got float64 \[3\]"),
        (encoded({"actions": np.zeros((2, 2), bool)}), r"got bool \[2, 2\]"),
        (encoded({"actions": np.full((1, 1), np.nan)}), "the actions are not finite"),
        (encoded({"actions": np.full((1, 1), 1e39)}), "the actions are not finite"),
        (lambda connection: connection.close(1011, "broken"), "1011.*broken"),
        (lambda connection: connection.socket.shutdown(socket.SHUT_RDWR), "no close frame"),
    ],
)
def test_other_answers_are_errors_of_one_line_and_the_next_observation_is_answered(
    client, server, answer: bytes | str | Callable, message
):
    server.answers = [answer]
    with pytest.raises(
        EngineError, match=rf"(?s)^no actions from ws://127\.0\.0\.1:\d+: .*{message}"
    ) as error:
        client.infer(OBSERVATION)
    assert str(error.value).isprintable()
    np.testing.assert_array_equal(client.infer(OBSERVATION), ACTIONS)


def test_a_late_answer_is_never_that_of_a_later_observation(url, server):
    server.answers = [0.4, encoded({"actions": 2 * ACTIONS})]
    client = PolicyClient(url, timeout_s=0.2)
    with pytest.raises(EngineError, match=r"no answer within 0\.2 s"):
        client.infer(OBSERVATION)
    np.testing.assert_array_equal(client.infer(OBSERVATION), 2 * ACTIONS)
    client.close()
    assert server.connections == 2


def test_a_server_that_says_nothing_is_left_within_the_time_or_when_cancelled(server):
    """While it connects: the time is for the connection and the answer together."""
    server.pause = 2.0
    with running(server) as url:
        client, began = PolicyClient(url, timeout_s=0.3), time.monotonic()
        with pytest.raises(EngineError, match=r"no connection from .*: no answer within 0\.3 s"):
            client.infer(OBSERVATION)
        assert client.infer(OBSERVATION, lambda: True) is None
        assert time.monotonic() - began < 1.5


def test_a_cancelled_observation_has_no_actions_and_leaves_no_answer_behind(client, server):
    server.answers = [0.3, encoded({"actions": 2 * ACTIONS})]
    cancelled = iter([False, False, True])
    assert client.infer(OBSERVATION, lambda: next(cancelled)) is None
    np.testing.assert_array_equal(client.infer(OBSERVATION), 2 * ACTIONS)


def test_a_server_that_was_started_again_is_connected_again(server):
    with running(server) as url:
        client = PolicyClient(url)
        client.infer(OBSERVATION)
    with pytest.raises(EngineError, match=r"no connection from ws://.*refused"):
        client.infer(OBSERVATION)
    with running(server):
        np.testing.assert_array_equal(client.infer(OBSERVATION), ACTIONS)
        client.close()


@pytest.mark.parametrize("metadata", ["no, thank you", b"\xc1", encoded({"action_names": ["other"]})])
def test_a_server_that_does_not_fit_is_refused(url, server, metadata):
    def check(told: Any) -> None:
        if "action_names" in told:
            raise ValueError("its actions are other")

    server.metadata = metadata
    with pytest.raises(EngineError, match="no connection from ws://"):
        PolicyClient(url, check_metadata=check).infer(OBSERVATION)
    assert not server.received
