# SPDX-License-Identifier: Apache-2.0
"""`edgellm generate` with a policy."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.cli import main
from edgellm_ros.io.number_files import read_state
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON, write_smolvla

STATE = (0.3, -1.0, 2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    export(write_smolvla(folder / "checkpoint"), folder / "engine")
    for i, (name, size) in enumerate(CAMERAS.items()):
        image = np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{name}.png"), image)
    return folder


def generate(folder, *options: str) -> int:
    images = (f"--image={folder / f'{name}.png'}" for name in ("wrist", "top"))
    state = ",".join(map(str, STATE))
    fixed = ("--cameras", "wrist,top", "--noise-seed", "3", f"--state={state}")
    return main(["generate", str(folder / "engine"), "--prompt", "go", *images, *fixed, *options])


@pytest.fixture(scope="module")
def expected(folder) -> np.ndarray:
    images = [cv2.imread(str(folder / f"{name}.png"))[:, :, ::-1] for name in CAMERAS]
    images = [np.ascontiguousarray(image) for image in images]
    with LLMInferenceRuntime(folder / "engine") as runtime:
        request = LLMGenerationRequest("go", images=tuple(images), state=np.array(STATE), noise_seed=3)
        return runtime.handle_request(request).actions


def test_json_has_the_actions(folder, capsys, expected):
    assert generate(folder, "--json") == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    np.testing.assert_allclose(answer["actions"], expected, rtol=1e-6)
    assert (answer["text"], answer["paths"]) == ("", None)


def test_actions_are_printed_as_a_table(folder, capsys, expected):
    assert generate(folder, "--action-samples", "2") == 0
    out, err = capsys.readouterr()
    header, *lines = (line.split("\t") for line in out.splitlines())
    assert header == ["sample", "time [s]", *(f"action_{i}" for i in range(ACTIONS))]
    assert len(lines) == 2 * HORIZON
    np.testing.assert_allclose(np.array(lines[1][2:], float), expected[0, 1], rtol=1e-4, atol=1e-4)
    assert f"2 x {HORIZON} actions" in err


def test_a_state_is_read_from_files_and_numbers(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(STATE))
    np.save(tmp_path / "state.npy", np.array(STATE))
    for given in ("0.3,-1,2", str(tmp_path / "state.json"), str(tmp_path / "state.npy")):
        np.testing.assert_array_equal(read_state(given), np.float32(STATE))


@pytest.mark.parametrize(
    ("given", "message"),
    [("1,two", "--state 1,two: could not convert"), ("[[1]]", "expected a list of numbers, got shape")],
)
def test_a_state_that_is_no_list_of_numbers_is_refused(tmp_path, given, message):
    if given.startswith("["):
        (tmp_path / "state.json").write_text(given)
        given = str(tmp_path / "state.json")
    with pytest.raises(ValueError, match=message):
        read_state(given)


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_commands_that_need_text_refuse_a_policy(folder, command, capsys):
    assert main([command, str(folder / "engine")]) == 2
    assert "needs an engine that answers with text; this one is a policy (smolvla)" in capsys.readouterr().err


def test_requests_of_a_file_have_state_and_cameras(folder, tmp_path, expected):
    images = [str(folder / f"{name}.png") for name in ("wrist", "top")]
    request = {
        "prompt": "go", "images": images, "cameras": ["wrist", "top"], "state": list(STATE), "noise_seed": 3,
    }  # fmt: skip
    (tmp_path / "requests.json").write_text(json.dumps([request]))
    options = ["--requests", str(tmp_path / "requests.json"), "--out", str(tmp_path / "out.json")]
    assert main(["generate", str(folder / "engine"), *options]) == 0
    (answer,) = json.loads((tmp_path / "out.json").read_text())
    np.testing.assert_allclose(answer["actions"], expected, rtol=1e-6)
