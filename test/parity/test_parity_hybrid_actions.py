# SPDX-License-Identifier: Apache-2.0
"""Action experts on hybrid models against PyTorch, over the caches of the layers that they name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from expert_reference import ExpertReference  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.kernels.random import normal_noise  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.hybrid_checkpoints import (  # noqa: E402
    add_action_expert,
    write_nemotron_h_checkpoint,
    write_qwen3_5_checkpoint,
)

TOLERANCE = 1e-3
LINEAR, FULL = "linear_attention", "full_attention"
WRITERS = {  # attention in layers 1, 3 and 4
    "nemotron_h": lambda path, seed: write_nemotron_h_checkpoint(
        path, seed, hybrid_override_pattern="M*M**-"
    ),
    "qwen3_5": lambda path, seed: write_qwen3_5_checkpoint(
        path, seed, num_hidden_layers=5, layer_types=[LINEAR, FULL, LINEAR, FULL, FULL]
    ),
}
KV_LAYERS, KV_CACHES = [4, 1], (2, 0)


def trigger_after(engine, index: int) -> None:
    """Make the token that the model writes at this index trigger the action head."""
    request = LLMGenerationRequest("go", sampling=SamplingParams(max_tokens=index + 1))
    with LLMInferenceRuntime(engine) as runtime:
        trigger = runtime.handle_request(request).token_ids[-1]
    config = EngineConfig.load(engine)
    action = dataclasses.replace(config.action, future_start_token_id=trigger)
    stops = (*config.stop_token_ids, trigger)
    dataclasses.replace(config, action=action, stop_token_ids=stops).save(engine)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", WRITERS)
def test_trajectories_match(tmp_path, runtime_device, family, seed):
    checkpoint = WRITERS[family](tmp_path / "checkpoint", seed)
    add_action_expert(checkpoint, KV_LAYERS, len(KV_LAYERS))
    config = export(checkpoint, tmp_path / "engine")
    assert config.action.kv_caches == KV_CACHES
    trigger_after(tmp_path / "engine", 4)
    request = LLMGenerationRequest("go", action_samples=2, noise_seed=5)
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device) as runtime:
        response = runtime.handle_request(request)
        device, cache = runtime.pipeline.device, runtime.pipeline.runner.kv_cache
        tensors = {name: device.download(rows)[0] for name, rows in cache.bindings(range(1)).items()}
        std = np.array(runtime.config.action.action_space.std)
    length = response.prompt_tokens + len(response.token_ids)
    caches = [
        tuple(torch.from_numpy(tensors[f"{kind}_cache_{i}"][:, :length]) for kind in ("key", "value"))
        for i in KV_CACHES
    ]
    reference = ExpertReference.load(checkpoint / "action_expert", config.llm.rope.rotary_dim)
    shape = reference.config["action_space"]["horizon"], len(std)
    noise = normal_noise(5, 2, shape[0] * shape[1]).reshape(2, *shape)
    for found, start in zip(response.actions, noise, strict=True):
        sampled = reference.sample(torch.from_numpy(start), 4, caches, length)
        expected = reference.physical(sampled).numpy()
        np.testing.assert_allclose(found / std, expected / std, atol=TOLERANCE, rtol=0)
