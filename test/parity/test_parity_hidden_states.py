# SPDX-License-Identifier: Apache-2.0
"""Hidden states of every layer, against those that transformers reports."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("transformers")

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402

TOLERANCE = 1e-3


def test_hidden_states_match_in_every_layer(checkpoint, thinker, tmp_path, device):
    pixels = thinker.processor.size["shortest_edge"]
    width = {71680: 320}.get(pixels, 64)
    image = np.random.default_rng(1).integers(0, 256, (pixels // width, width, 3), np.uint8)
    layers = thinker.model.config.get_text_config().num_hidden_layers
    export(checkpoint, tmp_path, hidden_state_layers=range(1, layers + 1))
    request = LLMGenerationRequest(
        "go to the red box", images=(image,), sampling=SamplingParams(max_tokens=1)
    )
    prompt = thinker.prompt("go to the red box", image=image)
    expected = thinker.model(**thinker._inputs(prompt), output_hidden_states=True, use_cache=False)
    with LLMInferenceRuntime(tmp_path, device) as runtime:
        runtime.handle_request(request, output_thinker_embeddings=True)
        assert runtime.base_model_input_token_ids == prompt.input_ids.tolist()
        assert len(expected.hidden_states) == layers + 1
        for layer, states in enumerate(expected.hidden_states):
            found = device.download(runtime.base_model_hidden_states(layer))
            np.testing.assert_allclose(found, states, atol=TOLERANCE, rtol=0)
