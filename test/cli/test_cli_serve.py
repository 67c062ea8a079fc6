# SPDX-License-Identifier: Apache-2.0
"""`edgellm serve`: the command around the server of OpenAI's API."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import openai
import pytest

from fixtures.served_openai import KEY, client


@pytest.mark.slow
def test_a_served_engine_answers_as_the_engine_does_and_ends_by_a_signal(edgellm, tiny_engine, tmp_path):
    (tmp_path / "token").write_text(KEY)
    command = [sys.executable, "-m", "edgellm_ros", "serve", tiny_engine, "--port", "0", "--json"]
    options = ["--token-file", tmp_path / "token", "--model-name", "mine", "--max-tokens", "50"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        told = json.loads(server.stdout.readline())
        with client(told["port"], KEY) as made:
            asked = {"model": "mine", "messages": [{"role": "user", "content": "go"}]}
            answer = made.chat.completions.create(**asked, max_tokens=8)
            with pytest.raises(openai.BadRequestError, match="max_tokens must be an integer from 1 to 50"):
                made.chat.completions.create(**asked, max_tokens=51)
        with client(told["port"], "wrong") as other, pytest.raises(openai.AuthenticationError):
            other.models.list()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        log = server.stderr.read().decode()
    assert (told["host"], told["model"]) == ("127.0.0.1", "mine")
    arguments = ("--prompt", "go", "--max-tokens", 8, "--action-samples", 0, "--json")
    assert answer.choices[0].message.content == edgellm("generate", tiny_engine, *arguments).json["text"]
    assert '"POST /v1/chat/completions HTTP/1.1" 200' in log
    assert "Traceback" not in log
    assert KEY not in log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "other computers can connect, which needs --token-file; --no-token lets"),
        (["--token-file", "TOKEN", "--no-token"], "--token-file and --no-token: give one of them"),
        (["--max-requests", "0"], "expected a whole number from 1 to 256, got 0"),
        (["--max-body", "x"], "expected a whole number, got 'x'"),
    ],
)
def test_options_that_do_not_fit(edgellm, tiny_engine, options, message):
    run = edgellm("serve", tiny_engine, *options)
    assert (run.code, run.out) == (2, "")
    assert message in run.err


def test_without_its_packages_the_command_says_how_to_get_them(edgellm, tiny_engine, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("edgellm_ros.serving.openai")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    run = edgellm("serve", tiny_engine)
    assert run.code == 2
    assert "needs starlette, uvicorn and prometheus-client: pip install 'edgellm[serve]'" in run.err
