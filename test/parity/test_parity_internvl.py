# SPDX-License-Identifier: Apache-2.0
"""InternVL checkpoints with random sizes and switches, against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_graphs import Graph  # noqa: E402
from greedy_answers import TOKENS, TOLERANCE, check_greedy_answer  # noqa: E402
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.multimodal.image_processor import make_image_processor  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.internvl_checkpoint import write_internvl_checkpoint  # noqa: E402
from fixtures.pixel_values import pixel_values  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402

SIZES = [(40, 60), (131, 33), (7, 5)]
LIMITS = {"max_input_len": 640, "max_kv_cache_capacity": 700}


class StillImageProcessor(transformers.InternVLProcessor):
    """InternVL's processor without the one for videos, which needs Torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return None


def random_changes(seed: int) -> dict[str, Any]:
    """Choose sizes and switches of a checkpoint.

    The first seeds have every value of each switch.
    """
    rng = np.random.default_rng(seed)
    head_dim, heads = int(rng.choice([8, 16, 24])), int(rng.integers(1, 5))
    patch, merge = int(rng.integers(2, 8)), int(rng.choice([1, 2, 4]))
    kv_heads = int(rng.integers(1, 3))
    vision = {
        "hidden_size": head_dim * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": int(rng.integers(1, 4)),
        "intermediate_size": int(rng.integers(20, 90)),
        "patch_size": patch,
        "image_size": patch * merge * int(rng.integers(1, 5)),
        "norm_type": ("layer_norm", "rms_norm")[seed % 2],
        "use_qk_norm": seed % 4 < 2,
        "attention_bias": seed % 3 > 0,
        "use_absolute_position_embeddings": seed % 8 != 3,
        "use_mean_pooling": seed % 5 != 1,
        "layer_norm_eps": float(rng.choice([1e-6, 1e-3])),
    }
    text = {
        "model_type": ("qwen2", "qwen3")[seed // 2 % 2],
        "hidden_size": 16 * int(rng.integers(2, 5)),
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads,
    }
    text["head_dim"] = 16 if text["model_type"] == "qwen3" else text["hidden_size"] // (2 * kv_heads)
    if text["head_dim"] % 2:
        text["hidden_size"], text["head_dim"] = 32 * kv_heads, 16
    return {
        "text": text,
        "vision": vision,
        "downsample_ratio": 1 / merge,
        "max_tiles": int(rng.integers(1, 7)),
        "older_names": seed % 3 == 2,
        "tie_word_embeddings": seed % 4 == 1,
        "seed": seed,
    }


@pytest.fixture(scope="module", params=range(10))
def checkpoint(request, tmp_path_factory):
    return write_internvl_checkpoint(
        tmp_path_factory.mktemp("internvl") / "checkpoint", **random_changes(request.param)
    )


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory, **LIMITS)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint):
    loaded, info = transformers.InternVLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return loaded.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def processor(checkpoint):
    """InternVL's processor, with the image processor that resizes with Pillow."""
    return StillImageProcessor(
        GotOcr2ImageProcessorPil.from_pretrained(checkpoint),
        transformers.AutoTokenizer.from_pretrained(checkpoint),
        None,
        image_seq_length=transformers.AutoConfig.from_pretrained(checkpoint).image_seq_length,
        chat_template=(checkpoint / "chat_template.jinja").read_text(),
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_of_tower_and_projector_match(engine, model, processor, size):
    image = make_image(*size)
    pixels = pixel_values(make_image_processor(EngineConfig.load(engine).vision), image)
    found = Graph(engine / "visual" / "model.onnx")(pixel_values=pixels)["image_embeds"]
    tiles = processor.image_processor(image, crop_to_patches=True, return_tensors="pt")["pixel_values"]
    expected = model.get_image_features(tiles, return_dict=True).pooler_output.flatten(0, 1)
    assert len(tiles) == len(pixels)
    assert expected.std() > 0.05
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sizes", [[], SIZES[:1], SIZES], ids=len)
def test_prompt_greedy_tokens_and_log_probabilities_match(
    checkpoint, engine, model, processor, sizes, runtime_device
):
    images = tuple(make_image(*size) for size in sizes)
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": "go there"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(images=list(images) or None, text=text, return_tensors="pt")
    sampling = SamplingParams(max_tokens=TOKENS)
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        request = LLMGenerationRequest("go there", images=images, sampling=sampling, logprobs=5)
        found = runtime.handle_request(request)
        assert runtime.base_model_input_token_ids == inputs["input_ids"].tolist()
    inputs.pop("token_type_ids", None)
    check_greedy_answer(found, model, inputs)
