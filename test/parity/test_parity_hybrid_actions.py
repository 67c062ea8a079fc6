# SPDX-License-Identifier: Apache-2.0
"""Action experts on hybrid models against PyTorch.

The experts attend to the caches of the layers that they name.
"""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from expert_reference import ExpertReference  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.kernels.random import normal_noise  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402
from fixtures.action_trigger import trigger_after  # noqa: E402
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
