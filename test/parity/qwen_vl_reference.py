# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of Qwen's vision-language models, and their answers by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prompt.rope import get_rope_index
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

TOLERANCE = 1e-3
TOKENS = 32


def save_random_weights(model_class: Any, directory: Path, seed: int) -> None:
    """Write weights for the directory's config.json as transformers writes them."""
    torch.manual_seed(seed)
    model = model_class(transformers.AutoConfig.from_pretrained(directory)).requires_grad_(False)
    for value in model.parameters():
        if value.dim() > 1:
            value.normal_(0, np.prod(value.shape[1:]) ** -0.5)
        else:
            value.normal_(0.5, 0.2)
    model.get_input_embeddings().weight.normal_(0, 1)
    generation = (directory / "generation_config.json").read_text()
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(generation)


def load(model_class: Any, checkpoint: Path) -> Any:
    """Load a checkpoint, of which transformers must know every tensor."""
    model, info = model_class.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval().requires_grad_(False)


def check_answer(
    engine: Path, device: Any, checkpoint: Path, model: Any, images: tuple[np.ndarray, ...]
) -> None:
    """Check positions, greedy tokens and log-probabilities of an answer."""
    request = LLMGenerationRequest(
        "go there", images=images, sampling=SamplingParams(max_tokens=TOKENS), logprobs=5
    )
    with LLMInferenceRuntime(engine, device) as runtime:
        found = runtime.handle_request(request)
        ids = runtime.base_model_input_token_ids
    inputs = {"input_ids": torch.tensor(ids)}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    grids = []
    if images:
        processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        inputs |= processor(list(images), return_tensors="pt")
        grids = (inputs["image_grid_thw"][:, 1:] // model.config.vision_config.spatial_merge_size).tolist()
    special = model.config.image_token_id, model.config.vision_start_token_id
    positions, delta = get_rope_index(ids[0], [tuple(grid) for grid in grids], *special)
    expected, expected_delta = model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
    )
    np.testing.assert_array_equal(positions, expected[:, 0])
    assert delta == int(expected_delta)
    answer = model.generate(
        **inputs,
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(answer.logits)
    assert found.token_ids == answer.sequences[0, len(ids[0]) :].tolist()
    assert logits.abs().max() > 0.5
    for entries, row in zip(found.logprobs, logits.double().log_softmax(-1), strict=True):
        tokens, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(tokens)], atol=TOLERANCE, rtol=0)
