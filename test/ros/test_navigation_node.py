# SPDX-License-Identifier: Apache-2.0
"""Commands and goals of a node with a small Alpamayo, as instructions."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
from edgellm_ros.action import Plan

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.ros.node.engine_checks import check_before_loading
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.alpamayo_checkpoint import export_driving, write_alpamayo
from fixtures.peer import image_message
from fixtures.reference_inputs import make_image

FRAME, TEXT, TOKENS = make_image(48, 64), "turn left in 40 m", 40
ASKED = LLMGenerationRequest(
    images=(FRAME,), navigation=TEXT, sampling=SamplingParams(max_tokens=TOKENS, temperature=0.0)
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alpamayo")
    export_driving(folder, ASKED)
    return folder / "engine"


@pytest.fixture(scope="module")
def answer(engine, runtime_device):
    """`answer(**fields)`: tokens and actions of ASKED with these fields."""
    with LLMInferenceRuntime(engine, runtime_device, drafting="off") as runtime:

        def answer(**fields: object) -> tuple[list[int], np.ndarray | None]:
            request = dataclasses.replace(ASKED, action_samples=1, **fields)
            response = runtime.handle_request(request)
            return response.token_ids, None if response.actions is None else response.actions[0]

        yield answer


@pytest.fixture(scope="module")
def node(start_node, peer, engine):
    child = start_node(
        engine_dir=engine, autostart="true", temperature=0.0, max_tokens=TOKENS, navigation="true",
        max_input_age=600.0, plan_timeout=60.0, input_reliability="reliable",
    )  # fmt: skip
    peer.connect()
    return child


def values(chunk) -> np.ndarray:
    return np.array(chunk.values, np.float32).reshape(chunk.horizon, -1)


def planned(peer, text: str) -> tuple[list[int], np.ndarray | None]:
    """Return tokens and actions of a goal."""
    result = peer.plan(Plan.Goal(prompt=text, images=[image_message(FRAME)]))
    assert (result.termination_reason, result.message) == ("completed", "")
    actions = values(result.action_chunks[0]) if result.action_chunks else None
    return list(result.generation.token_ids), actions


def assert_equal(found, expected) -> None:
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_command_is_an_instruction(node, peer, answer):
    peer.clear()
    peer.frame(FRAME)
    peer.wait(lambda: peer.metrics()["frames_received"], "frame")
    peer.command(TEXT)
    peer.wait(lambda: peer.received["action_chunk"] and peer.received["generation"], "plan")
    found = list(peer.received["generation"][0].token_ids), values(peer.received["action_chunk"][0])
    assert_equal(found, answer())


def test_a_goal_is_an_instruction_which_guides_with_a_weight(node, peer, answer):
    assert_equal(planned(peer, TEXT), answer())
    assert peer.set_parameter("guidance", 2.0).successful
    found = planned(peer, TEXT)
    assert_equal(found, answer(guidance=2.0))
    assert np.abs(found[1] - answer()[1]).max() > 1e-3
    assert_equal(planned(peer, ""), answer(navigation=""))
    refused = peer.set_parameter("chunking", "guided")
    assert not refused.successful
    assert refused.reason.startswith("guidance 2 and chunking 'guided': a guided plan continues no chunk")
    assert peer.set_parameter("guidance", -1.0).successful
    assert peer.set_parameter("chunking", "guided").successful
    assert not peer.set_parameter("guidance", 0.0).successful
    assert peer.set_parameter("chunking", "off").successful


def test_without_the_parameter_a_text_is_the_prompt(node, peer, answer):
    assert peer.set_parameter("navigation", False).successful
    assert_equal(planned(peer, TEXT), answer(prompt=TEXT, navigation=""))
    assert peer.set_parameter("navigation", True).successful


@pytest.mark.parametrize(
    ("version", "values", "reason"),
    [
        (
            "alpamayo1_5",
            {"guidance": 1.5},
            "parameter guidance must be -1: guidance needs a second row for the prompt without navigation; "
            "this engine has one (max_batch_size 1): export it with --max-batch-size 2, got 1.5",
        ),
        (
            "alpamayo_r1",
            {"guidance": 0.0},
            "parameter guidance must be -1: this engine takes no instructions of navigation, got 0",
        ),
        (
            "alpamayo_r1",
            {"navigation": True},
            "parameter navigation must be false: this engine takes no instructions of navigation, got true",
        ),
    ],
)
def test_what_an_engine_does_not_take_is_refused_before_it_is_loaded(tmp_path, version, values, reason):
    export(write_alpamayo(tmp_path / "checkpoint", model_type=version), tmp_path / "engine", max_batch_size=1)
    parameters = {"cameras": [""], "state_joints": [""], "navigation": False, "guidance": -1.0, **values}
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        check_before_loading(SimpleNamespace(**parameters), EngineConfig.load(tmp_path / "engine"))
