# SPDX-License-Identifier: Apache-2.0
"""A few arena scenes against recorded answers of transformers and PyTorch.

record.py records the answers for machines that have neither.
"""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from checkpoint_digest import checkpoint_digest

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

TOLERANCE = 1e-3
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def runtime(trained_checkpoint, tmp_path_factory, runtime_device):
    from edgellm_ros.builder import export

    directory = tmp_path_factory.mktemp("engine")
    export(trained_checkpoint, directory)
    with LLMInferenceRuntime(directory, runtime_device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def references(recorded_references, trained_checkpoint):
    with np.load(recorded_references) as arrays:
        references = dict(arrays)
    if references["checkpoint"] != checkpoint_digest(trained_checkpoint):
        pytest.fail(f"{trained_checkpoint} is not the recorded checkpoint: run test/parity/record.py")
    return references


@pytest.mark.parametrize("scene", range(3))
def test_runtime_answers_and_drives_as_recorded(runtime, references, scene):
    recorded = {
        name.removesuffix(f"_{scene}"): array
        for name, array in references.items()
        if name.endswith(f"_{scene}")
    }
    response = runtime.handle_request(
        LLMGenerationRequest(
            prompt=str(references["prompts"][scene]),
            images=(cv2.imdecode(recorded["image"], cv2.IMREAD_COLOR)[:, :, ::-1],),
            history=recorded["history"],
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            logprobs=recorded["top_ids"].shape[1],
            action_samples=1,
            noise_seed=int(recorded["noise_seed"]),
        )
    )
    assert response.token_ids == recorded["token_ids"].tolist()
    for found, ids, values in zip(
        response.logprobs, recorded["top_ids"], recorded["top_logprobs"], strict=True
    ):
        expected = dict(zip(ids.tolist(), values, strict=True))
        np.testing.assert_allclose(
            [value for token, value in found if token in expected],
            [expected[token] for token, _ in found if token in expected],
            atol=TOLERANCE,
        )
    assert response.actions is not None
    std = np.asarray(runtime.config.action.action_space.std)
    np.testing.assert_allclose(response.actions[0] / std, recorded["actions"] / std, atol=TOLERANCE)
