# SPDX-License-Identifier: Apache-2.0
"""`edgellm serve-policy` and `edgellm connect-policy`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import cv2
import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.remote_policy import physical_actions, write_remote_policy
from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.diffusion.policy_config import CameraConfig
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.act_checkpoint import write_act
from fixtures.openpi_server import ACTIONS, Server, running
from fixtures.plain_msgpack import encoded
from fixtures.smolvla_checkpoint import CAMERAS

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    export(write_act(folder / "checkpoint"), folder / "engine")
    for i, (name, size) in enumerate(CAMERAS.items()):
        image = np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{name}.png"), image)
    (folder / "token").write_text(TOKEN)
    return folder


@pytest.fixture
def url():
    """The URL of a server of others, which tells no names."""
    with running(Server()) as address:
        yield address


@pytest.mark.slow
def test_a_served_policy_answers_as_the_engine_does(edgellm, folder, tmp_path):
    command = [sys.executable, "-m", "edgellm_ros", "serve-policy", folder / "engine", "--port", "0"]
    options = ["--json", "--image-key", "top=images/top", "--token-file", folder / "token"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        port = json.loads(server.stdout.readline())["port"]
        url, remote = f"ws://127.0.0.1:{port}", tmp_path / "remote"
        refused = edgellm("connect-policy", url, remote)
        made = edgellm("connect-policy", url, remote, "--token-file", folder / "token", "--json")
        request = [f"--image={folder / f'{name}.png'}" for name in CAMERAS]
        request += ["--state=0.1,0.2,0.3", "--json"]
        found, expected = (edgellm("generate", each, *request) for each in (remote, folder / "engine"))
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
        log = server.stderr.read().decode()
    assert (refused.code, refused.out) == (2, "")
    assert "HTTP 401" in refused.err
    assert (made.json["horizon"], made.json["image_keys"]) == (6, ["images/top", "observation/wrist"])
    assert found.json["actions"] == expected.json["actions"]
    assert "refused, without the token" in log
    assert "Traceback" not in log
    assert edgellm("generate", remote, *request).err.startswith(
        "edgellm generate: error: no connection from ws:"
    )


def test_a_server_of_others_needs_names_and_a_rate(edgellm, url, tmp_path):
    options = ["--image-key", "top=observation/image", "--action-names", "a,b", "--fps", "10"]
    options += ["--state-names", "x,y,z", "--state-key", "joints", "--state-size", "2", "--state-key", "grip"]
    options += ["--state-size", "1", "--image-size", "24x32"]
    run = edgellm("connect-policy", url, tmp_path / "engine", *options)
    assert run.code == 0, run.err
    policy = EngineConfig.load(tmp_path / "engine").policy
    assert (policy.action_space.names, policy.action_space.horizon) == (("a", "b"), len(ACTIONS))
    assert (policy.action_space.dt, policy.image_size) == (0.1, (24, 32))
    assert (policy.state_keys, policy.state_sizes) == (("joints", "grip"), (2, 1))
    shown = edgellm("inspect", tmp_path / "engine").out
    assert f"  server   {url}, which computes the actions: no engine is here\n" in shown
    assert "prefix" not in shown
    assert "weights" not in shown


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    """A directory of `edgellm connect-policy`, whose server does not run."""
    folder = tmp_path_factory.mktemp("connection")
    policy = OpenPiConfig(
        cameras=CameraConfig(("top",)),
        state=None,
        action_space=physical_actions(("a",), ("",), dt=0.1, horizon=2),
        url="ws://127.0.0.1:9",
        token_file="",
        image_keys=("image",),
        image_size=(),
        state_keys=(),
        state_sizes=(),
        prompt_key="prompt",
        timeout_s=1.0,
    )
    write_remote_policy(policy, folder)
    return folder


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            ["build", "HERE"],
            "HERE: there is nothing to build: made by `edgellm connect-policy`, it has no engine "
            "but asks the policy at ws://127.0.0.1:9 for actions",
        ),
        (["build", "HERE", "--gpu", "sm_89"], "HERE: there is nothing to build: made by"),
        (
            ["bench", "HERE"],
            "edgellm bench needs an engine that answers with text; this one is a policy (openpi)",
        ),
        (["chat", "HERE"], "a chat needs an engine that answers with text; this one is a policy (openpi)"),
        (["transcribe", "HERE", "x.wav"], "HERE: this engine (openpi) writes no transcripts"),
        (["export", "HERE", "OTHER"], "HERE/config.json: of an engine directory, expected a checkpoint"),
        (
            ["demo", "--engine", "HERE"],
            "HERE: made by `edgellm connect-policy`, it asks a policy on another computer",
        ),
        (
            ["evaluate", "arena", "--engine", "HERE", "--precision", "fp32"],
            "HERE: made by `edgellm connect-policy`",
        ),
        (
            ["evaluate", "arena", "--engine", "HERE"],
            "the arena needs an engine that answers with text; this one is a",
        ),
        (
            ["generate", "HERE", "--prompt", "go", "--image", "top.png"],
            "no connection from ws://127.0.0.1:9: ",
        ),
    ],
)
def test_a_connection_is_no_engine(edgellm, connection, folder, tmp_path, command, reason):
    places = {"HERE": str(connection), "OTHER": str(tmp_path), "top.png": str(folder / "top.png")}
    before = (connection / "config.json").read_bytes()
    run = edgellm(*(places.get(word, word) for word in command))
    assert run.code == 2
    assert f"error: {reason.replace('HERE', str(connection))}" in run.err
    assert run.err.count("\n") == 1
    assert (connection / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--fps 10 --action-names a,b", "--image-key: the server does not tell its cameras"),
        ("--fps 10 --image-key top", "--image-key: expected CAMERA=KEY once for a camera, got 'top'"),
        ("--image-key top=a --fps 10", "--action-names: the server does not tell them"),
        ("--image-key top=a --action-names a,b", "--fps: the server does not tell how many rows"),
        ("--image-key top=a --action-names a --fps 10", "the server answers with 2 values, got 1 names"),
        (
            "--image-key t=a --action-names a,b --fps 9 --state-names x,y --state-key c --state-key d",
            "--state-size: expected one for each of 2 keys, 2 values in all, got []",
        ),
        ("--image-size 24", "--image-size: expected a whole number, got ''"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_written(edgellm, url, tmp_path, options, message):
    run = edgellm("connect-policy", url, tmp_path / "engine", *options.split())
    assert run.code == 2
    assert message in run.err
    assert run.err.count("\n") == 1
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("names", [5, [1], {"a": 1}])
def test_odd_words_of_a_server_are_refused(edgellm, tmp_path, names):
    server = Server()
    server.metadata = encoded(
        {"server": "edgellm", "action_names": names, "image_keys": {"a": "b"}, "dt": 0.1}
    )
    with running(server) as url:
        run = edgellm("connect-policy", url, tmp_path / "engine")
    assert run.code == 2
    assert "the server tells action_names" in run.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "other computers can connect, which needs --token-file; --no-token lets"),
        (["--token-file", "TOKEN", "--no-token"], "--token-file and --no-token: give one of them"),
        (["--token-file", "no-such-file"], "no-such-file: No such file or directory"),
        (["--image-key", "left=a"], "unknown camera 'left'; the policy has top, wrist"),
        (["--port", "70000"], "expected a whole number from 0 to 65535, got 70000"),
    ],
)
def test_options_of_the_server_that_do_not_fit(edgellm, folder, options, message):
    run = edgellm("serve-policy", folder / "engine", *options)
    assert run.code == 2
    assert message in run.err


def test_an_engine_that_answers_with_text_is_not_served(edgellm, tiny_engine):
    run = edgellm("serve-policy", tiny_engine, "--port", "0")
    assert run.code == 2
    assert "the engine must be a policy" in run.err
