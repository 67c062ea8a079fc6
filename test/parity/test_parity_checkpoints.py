# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of unusual configurations are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fixtures.reference_inputs import make_image

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_graphs import Encoders, LanguageModel  # noqa: E402
from thinker_reference import ThinkerReference  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.multimodal.image_processor import make_image_processor  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint  # noqa: E402

TOLERANCE = 1e-3


def tied_with_a_matrix_of_its_own(config, tensors):
    config["tie_word_embeddings"] = True
    tensors["lm_head.weight"] = -tensors["lm_head.weight"]


def tied(config, tensors):
    config["tie_word_embeddings"] = True
    del tensors["lm_head.weight"]


def experts_in_no_layer(config, tensors):
    config["text_config"] |= {"num_experts": 8, "mlp_only_layers": [0, 1, 2]}


def as_many_deepstack_features_as_layers(config, tensors):
    config["vision_config"]["deepstack_visual_indexes"] = [0, 1, 2]
    for name in [name for name in tensors if "merger_list.1." in name]:
        tensors[name.replace("merger_list.1.", "merger_list.2.")] = (tensors[name] * 0.7).astype(np.float16)


def no_mrope_section(config, tensors):
    del config["text_config"]["rope_parameters"]["mrope_section"]


def wide_heads_and_no_mrope_section(config, tensors):
    del config["text_config"]["rope_parameters"]["mrope_section"]
    config["text_config"] |= {"head_dim": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    rng = np.random.default_rng(7)
    for name in tensors:
        if "self_attn" not in name or "visual" in name:
            continue
        sizes = {"q_proj": (640, 48), "k_proj": (320, 48), "v_proj": (320, 48), "o_proj": (48, 640)}
        module = name.split(".")[-2]
        if module in sizes:
            shape = sizes[module]
            tensors[name] = (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float16)
        else:
            tensors[name] = np.ones(160, np.float16)


CHANGES = [
    tied,
    tied_with_a_matrix_of_its_own,
    experts_in_no_layer,
    as_many_deepstack_features_as_layers,
    no_mrope_section,
    wide_heads_and_no_mrope_section,
]


def changed_checkpoint(directory: Path, change) -> Path:
    checkpoint = write_tiny_checkpoint(directory, action_expert=False, shards=1, audio_weights=False)
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    change(config, tensors)
    write_json(checkpoint / "config.json", config)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_logits_at_every_position_and_greedy_tokens_match(tmp_path, change, runtime_device):
    checkpoint = changed_checkpoint(tmp_path / "checkpoint", change)
    thinker, engine = ThinkerReference(checkpoint), tmp_path / "engine"
    export(checkpoint, engine)
    image = make_image(48, 64)
    prompt = thinker.prompt("go to the red box", image=image)
    wanted = range(prompt.input_ids.shape[1])
    found = LanguageModel(engine).prefill(thinker, Encoders(engine), prompt, wanted)
    expected = thinker.prefill_logits(prompt)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        request = LLMGenerationRequest(
            "go to the red box", images=(image,), sampling=SamplingParams(max_tokens=12)
        )
        assert runtime.handle_request(request).token_ids == thinker.answer(prompt, 12).token_ids


AREA = 64 * 48
LIMITS = {
    "size": {"size": {"shortest_edge": AREA, "longest_edge": 4 * AREA}},
    "min_pixels and max_pixels": {"min_pixels": 2 * AREA, "max_pixels": 3 * AREA},
    "size and other limits": {
        "size": {"shortest_edge": AREA, "longest_edge": AREA},
        "min_pixels": 4 * AREA,
        "max_pixels": 6 * AREA,
    },
    "size and another min_pixels": {
        "size": {"shortest_edge": 256, "longest_edge": 8 * AREA},
        "min_pixels": 4 * AREA,
    },
    "none": {},
}


@pytest.fixture(scope="module", params=LIMITS.values(), ids=LIMITS)
def processors(request, tmp_path_factory):
    """The engine's image processor and the checkpoint's, with these limits."""
    from transformers import AutoImageProcessor

    folder = tmp_path_factory.mktemp("limits")
    checkpoint = write_tiny_checkpoint(folder / "checkpoint", action_expert=False, audio_weights=False)
    path = checkpoint / "preprocessor_config.json"
    processor = json.loads(path.read_text())
    del processor["size"]
    write_json(path, processor | request.param)
    vision = export(checkpoint, folder / "engine").vision
    assert vision is not None
    return make_image_processor(vision), AutoImageProcessor.from_pretrained(checkpoint)


@pytest.mark.parametrize("shape", [(30, 40), (120, 150), (2000, 300)])
def test_an_image_is_resized_as_the_checkpoint_s_own_processor_does(processors, shape):
    ours, theirs = processors
    image = make_image(*shape)
    found = ours.token_grid(*shape)
    expected = theirs(images=[image], return_tensors="pt")
    assert [1, *(2 * side for side in found)] == expected["image_grid_thw"][0].tolist()
