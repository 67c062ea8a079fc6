# SPDX-License-Identifier: Apache-2.0
"""Families with a vision tower against transformers and PEFT.

Adapters and hidden states are compared, with an image in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402
from fixtures.vision_families import VISION_FAMILIES  # noqa: E402

TOLERANCE = 1e-3
TOKENS = 16
IMAGE = make_image(66, 130)  # windows of Qwen2.5-VL are cut off at both edges
TEXT_LAYERS = r".*language_model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj"


@dataclass(frozen=True)
class Case:
    family: str
    checkpoint: Path
    engine: Path
    layers: int
    base: Any  # transformers' model
    adapted: Any  # with PEFT's adapter

    def inputs(self, ids: list[list[int]]) -> dict[str, torch.Tensor]:
        """Make transformers' inputs of a prompt with the image."""
        inputs = {"input_ids": torch.tensor(ids)}
        if self.family == "internvl":
            processor = GotOcr2ImageProcessorPil.from_pretrained(self.checkpoint)
            tiles = processor(IMAGE, crop_to_patches=True, return_tensors="pt")
            return inputs | {"pixel_values": tiles["pixel_values"]}
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.base.config.image_token_id).int()
        processor = Qwen2VLImageProcessorPil.from_pretrained(self.checkpoint)
        return inputs | processor(IMAGE, return_tensors="pt")


def load(checkpoint: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def case(request, tmp_path_factory) -> Case:
    """One engine with all hidden states, and an adapter that PEFT has saved."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = VISION_FAMILIES[request.param](folder / "checkpoint")
    base = load(checkpoint)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TEXT_LAYERS)
    adapted = peft.get_peft_model(load(checkpoint), config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # PEFT starts with zeros
            parameter.data.normal_(std=0.3, generator=generator)
    adapted.save_pretrained(checkpoint / "lora" / "adapter")
    layers = base.config.text_config.num_hidden_layers
    export(checkpoint, folder / "engine", hidden_state_layers=range(1, layers + 1))
    return Case(request.param, checkpoint, folder / "engine", layers, base, adapted.eval())


def test_an_adapter_of_the_text_gives_the_tokens_and_log_probabilities_of_peft(case, runtime_device):
    request = LLMGenerationRequest(
        "go there", images=(IMAGE,), lora="adapter", sampling=SamplingParams(max_tokens=TOKENS), logprobs=5
    )
    with LLMInferenceRuntime(case.engine, runtime_device) as runtime:
        found = runtime.handle_request(request)
        inputs = case.inputs(runtime.base_model_input_token_ids)
    options = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    answer = case.adapted.generate(**inputs, max_new_tokens=TOKENS, **options)
    logits = torch.cat(answer.logits)
    assert found.token_ids == answer.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    for entries, row in zip(found.logprobs, logits.double().log_softmax(-1), strict=True):
        tokens, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(tokens)], atol=TOLERANCE, rtol=0)
    assert (logits[0] - case.base(**inputs).logits[0, -1]).abs().max() > 0.1  # else it would say little


def test_hidden_states_of_every_layer_match(case, device):
    request = LLMGenerationRequest("go there", images=(IMAGE,), sampling=SamplingParams(max_tokens=1))
    with LLMInferenceRuntime(case.engine, device) as runtime:
        runtime.handle_request(request, output_thinker_embeddings=True)
        inputs = case.inputs(runtime.base_model_input_token_ids)
        found = [device.download(runtime.base_model_hidden_states(i)) for i in range(case.layers + 1)]
    with torch.no_grad():
        expected = case.base(**inputs, output_hidden_states=True, use_cache=False).hidden_states
    for states, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(states, reference, atol=TOLERANCE, rtol=0)
