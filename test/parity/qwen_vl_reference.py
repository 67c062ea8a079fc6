# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of Qwen's vision-language models, and transformers' answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from greedy_answers import TOKENS, check_greedy_answer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prompt.rope import get_rope_index
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.reference_inputs import make_image

SIZES = [(48, 64), (131, 33), (20, 150)]
PROMPTS = [[], SIZES[:1], SIZES]  # the sizes of each prompt's images


@dataclass(frozen=True)
class Exported:
    """A checkpoint, its engine directory, and the same checkpoint in transformers."""

    checkpoint: Path
    engine: Path
    model: Any

    def inputs(self, ids: Sequence[int], images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Make the model's inputs of a prompt; transformers' processor makes the pixels."""
        inputs = {"input_ids": torch.tensor([ids])}
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.model.config.image_token_id).int()
        if images:
            processor = Qwen2VLImageProcessorPil.from_pretrained(self.checkpoint)
            inputs |= processor(list(images), return_tensors="pt")
        return inputs

    def check_positions(self, inputs: dict[str, torch.Tensor]) -> np.ndarray:
        """Check the positions [3,S] of a prompt, and return them."""
        config, grids, ids = self.model.config, [], inputs["input_ids"][0].tolist()
        if "image_grid_thw" in inputs:
            grids = (inputs["image_grid_thw"][:, 1:] // config.vision_config.spatial_merge_size).tolist()
        special = config.image_token_id, config.vision_start_token_id
        positions, delta = get_rope_index(ids, [tuple(grid) for grid in grids], *special)
        expected, expected_delta = self.model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
        )
        np.testing.assert_array_equal(positions, expected[:, 0])
        assert delta == int(expected_delta)
        return positions


def export_beside(checkpoint: Path, model_class: Any, **limits: int) -> Exported:
    """Export a checkpoint to `engine` beside it, and load it in transformers."""
    engine = checkpoint.with_name("engine")
    export(checkpoint, engine, **limits)
    return Exported(checkpoint, engine, load(model_class, checkpoint))


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


def check_answer(exported: Exported, device: Any, sizes: Sequence[tuple[int, int]]) -> None:
    """Check positions, tokens and log-probabilities of a greedy answer about images.

    sizes: of the images.
    """
    images = tuple(make_image(*size) for size in sizes)
    request = LLMGenerationRequest(
        "go there", images=images, sampling=SamplingParams(max_tokens=TOKENS), logprobs=5
    )
    with LLMInferenceRuntime(exported.engine, device) as runtime:
        found = runtime.handle_request(request)
        inputs = exported.inputs(runtime.base_model_input_token_ids[0], images)
    exported.check_positions(inputs)
    check_greedy_answer(found, exported.model, inputs)
