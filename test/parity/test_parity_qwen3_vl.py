# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL checkpoints and whole Qwen3-Omni ones against transformers.

The Qwen3-VL checkpoints have random sizes and switches.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from greedy_answers import TOKENS  # noqa: E402
from qwen_vl_reference import PROMPTS, check_answer, export_beside  # noqa: E402
from random_qwen_vl import write_random_qwen3_vl  # noqa: E402
from video_reference import check_videos  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint, write_whole_omni_checkpoint  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402
from fixtures.tiny_checkpoint import write_tiny_checkpoint  # noqa: E402


@pytest.fixture(scope="module", params=[*range(8), "fixture", "tied fixture"])
def exported(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3_vl") / "checkpoint"
    if isinstance(request.param, int):
        write_random_qwen3_vl(directory, request.param)
    else:
        write_qwen3_vl_checkpoint(directory, tied=request.param == "tied fixture")
    return export_beside(directory, transformers.Qwen3VLForConditionalGeneration)


@pytest.mark.parametrize("sizes", PROMPTS, ids=len)
def test_positions_greedy_tokens_and_log_probabilities_match(exported, sizes, runtime_device):
    check_answer(exported, runtime_device, sizes)


def test_videos_match(exported, runtime_device):
    check_videos(exported, runtime_device)


def test_the_thinker_of_a_whole_omni_checkpoint_is_the_thinker_alone(tmp_path):
    whole = write_whole_omni_checkpoint(tmp_path / "whole")
    alone = write_tiny_checkpoint(tmp_path / "alone", action_expert=False)
    _, info = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        whole, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    request = LLMGenerationRequest(
        "go", images=(make_image(48, 64),), sampling=SamplingParams(max_tokens=TOKENS), logprobs=3
    )
    answers = []
    for checkpoint in (whole, alone):
        export(checkpoint, checkpoint / "engine")
        with LLMInferenceRuntime(checkpoint / "engine") as runtime:
            answers.append(runtime.handle_request(request))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs
