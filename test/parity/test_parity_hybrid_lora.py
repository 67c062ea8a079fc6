# SPDX-License-Identifier: Apache-2.0
"""Adapters of hybrid models against PEFT on the same checkpoint.

A batch is compared row by row.
"""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint  # noqa: E402

TOLERANCE = 1e-3
WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
CASES = [(family, seed) for family in WRITERS for seed in range(4)]
ADAPTERS = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "recurrent": {
        "r": 3,
        "lora_alpha": 2,
        "use_rslora": True,
        "target_modules": r".*\.(in_proj(_qkv|_z|_b|_a)?|out_proj)",
        "rank_pattern": {r"layers\.0\..*in_proj\w*": 2},
    },
}
REQUESTS = (("all", "go to the red box " * 9), ("", "turn"), ("recurrent", "go"), ("", "to the door " * 12))
MAX_TOKENS = 16


def load(checkpoint: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def with_adapter(checkpoint: Path, seed: int, **config):
    """Return the model with a random adapter.

    PEFT refuses `out_proj` of Nemotron-H, because training through fused kernels leaves it as it is; adapters
    of other trainers have it.
    """
    model = load(checkpoint)
    with patch("peft.tuners.tuners_utils._check_lora_target_modules_mamba"):
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # PEFT starts with zeros
            parameter.data.normal_(std=0.2, generator=generator)
    return adapted.eval()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request, tmp_path_factory):
    family, seed = request.param
    folder = tmp_path_factory.mktemp(family)
    checkpoint = WRITERS[family](folder / "checkpoint", seed)
    models = {"": load(checkpoint)}
    for name, config in ADAPTERS.items():
        models[name] = with_adapter(checkpoint, seed, **config)
        models[name].save_pretrained(checkpoint / "lora" / name)
    export(checkpoint, folder / "engine")
    return folder / "engine", models


def test_each_row_of_a_batch_has_the_tokens_and_log_probabilities_of_its_adapter(case, runtime_device):
    engine, models = case
    batch = [
        LLMGenerationRequest(text, lora=name, sampling=SamplingParams(max_tokens=MAX_TOKENS), logprobs=4)
        for name, text in REQUESTS
    ]
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        found = runtime.handle_request(batch)
        prompts = runtime.base_model_input_token_ids
    order = sorted(range(len(batch)), key=lambda i: batch[i].lora)  # of the prefill
    for i, prompt in zip(order, prompts, strict=True):
        ids = torch.tensor([prompt + found[i].token_ids])
        with torch.no_grad():
            logits = {name: models[name](ids).logits[0, len(prompt) - 1 : -1] for name in {"", batch[i].lora}}
        expected = logits[batch[i].lora]
        assert found[i].token_ids == expected.argmax(-1).tolist()
        if batch[i].lora:
            assert (expected - logits[""]).abs().max() > 0.1  # else it would say little
        for entries, row in zip(found[i].logprobs, expected.double().log_softmax(-1), strict=True):
            tokens, values = zip(*entries, strict=True)
            np.testing.assert_allclose(values, row[list(tokens)], atol=TOLERANCE, rtol=0)


def test_every_linear_layer_that_peft_adapts_has_lora_inputs(case, runtime_device):
    engine, models = case
    adapted = {
        re.sub(r"^base_model\.model\.", "", name)
        for name, module in models["all"].named_modules()
        if hasattr(module, "lora_A")
    }
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        assert set(runtime.pipeline.loras.targets) == adapted
    assert any("in_proj" in name for name in adapted)
