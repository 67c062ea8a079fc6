# SPDX-License-Identifier: Apache-2.0
"""Families with a vision tower: fp16, and what they refuse.

test/parity compares them with transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.changed_json import change
from fixtures.reference_inputs import make_image
from fixtures.tiny_checkpoint import write_json
from fixtures.vision_families import VISION_FAMILIES

pytestmark = pytest.mark.only_on("cpu", reason="the export is the same for every device")
QWEN = ("qwen2_5_vl", "qwen3_5", "qwen3_vl")
CONFIG, PROCESSOR, GENERATION = "config.json", "preprocessor_config.json", "generation_config.json"
TOKENS, WEIGHTS = "tokenizer_config.json", "model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    return {name: write(folder / name) for name, write in VISION_FAMILIES.items()}


@pytest.fixture
def checkpoint(written, family, tmp_path) -> Path:
    return shutil.copytree(written[family], tmp_path / "checkpoint")


def assert_refused(checkpoint: Path, file: str, message: str) -> None:
    """Check that an export fails with one line, and writes nothing.

    The line begins with the file.
    """
    engine = checkpoint.with_name("engine")
    pattern = rf"^{re.escape(str(checkpoint / file))}: .*{re.escape(message)}"
    with pytest.raises(ValueError, match=pattern) as error:
        export(checkpoint, engine)
    assert "\n" not in str(error.value)
    assert not engine.exists()


WRONG_TYPES = [
    ("internvl", "hidden_size", "32", "expected an integer"),
    ("internvl", "image_size", [48, 40], "expected a square"),
    ("internvl", "layer_norm_eps", "tiny", "expected a number"),
    ("internvl", "use_qk_norm", 1, "expected true or false"),
    ("qwen2_5_vl", "depth", 3.0, "expected an integer"),
    ("qwen2_5_vl", "fullatt_block_indexes", 1, "expected a list of integers"),
    ("qwen2_5_vl", "window_size", [112], "expected an integer"),
    ("qwen3_5", "depth", "12", "expected an integer"),
    ("qwen3_5", "patch_size", [8, 8], "expected an integer"),
    ("qwen3_vl", "patch_size", True, "expected an integer"),
    ("qwen3_vl", "deepstack_visual_indexes", [0.5], "expected a list of integers"),
    ("qwen3_vl", "num_position_embeddings", None, "expected an integer"),
]


@pytest.mark.parametrize(("family", "key", "value", "message"), WRONG_TYPES)
def test_a_config_value_of_the_wrong_type_is_refused(checkpoint, key, value, message):
    change(checkpoint / CONFIG, ["vision_config", key], value)
    assert_refused(checkpoint, CONFIG, f"vision_config: {key} {value!r}: {message}")


VISION, ROPE = "vision_config", "text_config.rope_parameters"
UNSUPPORTED = [
    ("internvl", CONFIG, f"{VISION}.hidden_act", "silu", "hidden_act 'silu': supported: gelu"),
    ("internvl", CONFIG, f"{VISION}.norm_type", "batch_norm", "supported: layer_norm, rms_norm"),
    ("internvl", CONFIG, f"{VISION}.image_size", 50, "image_size 50: expected a multiple of 12"),
    ("internvl", CONFIG, "vision_feature_layer", -2, "vision_feature_layer -2: supported: -1"),
    ("internvl", CONFIG, "downsample_ratio", 0.3, "downsample_ratio 0.3: expected 1 / n, such as 0.5"),
    ("internvl", CONFIG, "image_seq_length", 64, "image_seq_length 64: supported: 16"),
    ("internvl", CONFIG, "text_config.model_type", "gemma3", "'gemma3': supported: qwen2, qwen3"),
    ("internvl", PROCESSOR, "size.width", 64, "size: width 64: supported: 48"),
    ("internvl", PROCESSOR, "max_patches", 0, "max_patches 0: expected at least 1"),
    ("internvl", TOKENS, "extra_special_tokens.end_image_token", ..., "end_image_token must be a string"),
    ("internvl", TOKENS, "extra_special_tokens.end_image_token", "</end>", "expected an added token"),
    ("qwen2_5_vl", CONFIG, f"{VISION}.hidden_act", "gelu", "hidden_act 'gelu': supported: silu"),
    ("qwen2_5_vl", CONFIG, f"{VISION}.fullatt_block_indexes", [3], "[3]: expected blocks from 0 to 2"),
    ("qwen2_5_vl", CONFIG, f"{VISION}.window_size", 15, "window_size must be at least 16 pixels, got 15"),
    ("qwen2_5_vl", CONFIG, f"{VISION}.num_heads", 3, "num_heads 3 must be a whole number"),
    ("qwen3_5", CONFIG, "vision_config", [], "vision_config []: expected an object"),
    ("qwen3_5", CONFIG, "text_config", ..., "key 'text_config' is missing"),
    ("qwen3_5", CONFIG, f"{VISION}.hidden_act", "silu", "'silu': supported: gelu_pytorch_tanh"),
    ("qwen3_5", CONFIG, f"{VISION}.deepstack_visual_indexes", [0], "indexes [0]: supported: [], None"),
    ("qwen3_5", CONFIG, f"{VISION}.num_position_embeddings", 10, "must be a square, got 10"),
    ("qwen3_5", CONFIG, f"{VISION}.rope_parameters.rope_theta", "1e4", "rope_theta '1e4': expected a number"),
    ("qwen3_5", CONFIG, f"{ROPE}.mrope_section", "11", "mrope_section '11': expected a list of integers"),
    ("qwen3_5", CONFIG, f"{ROPE}.mrope_section", [99, 9, 9], "(99, 9, 9) must sum to the "),
    ("qwen3_5", CONFIG, f"{ROPE}.mrope_interleaved", False, "mrope_interleaved False: supported: True"),
    ("qwen3_vl", CONFIG, f"{VISION}.hidden_act", "silu", "'silu': supported: gelu_pytorch_tanh"),
    ("qwen3_vl", CONFIG, f"{VISION}.rope_parameters", {"rope_type": "yarn"}, "'yarn': supported: axial"),
    ("qwen3_vl", CONFIG, f"{ROPE}.mrope_interleaved", False, "mrope_interleaved False: supported: True"),
]
OF_QWEN = [
    (CONFIG, f"{ROPE}.mrope_section", [], "mrope_section []: expected numbers of frequencies for time"),
    (CONFIG, f"{VISION}.in_channels", 4, "in_channels must be 3 (RGB), got 4"),
    (CONFIG, f"{VISION}.out_hidden_size", 64, "vision out_hidden_size 64 is not hidden_size 48"),
    (CONFIG, "vision_start_token_id", ..., "needs image_token_id and vision_start_token_id"),
    (PROCESSOR, "patch_size", 14, "patch_size 14: supported: 8"),
    (PROCESSOR, "size.longest_edge", 7, "largest area 7 is less than the smallest, "),
]
OF_ALL = [
    (CONFIG, "image_token_id", 9999, "image_token_id 9999: outside the vocabulary of"),
    (CONFIG, "image_token_id", ..., "needs image_token_id and vision_start_token_id"),
    (PROCESSOR, "image_mean", [0.5], "image_mean [0.5]: expected 3 values (RGB)"),
    (PROCESSOR, "do_resize", False, "do_resize False: supported: True"),
    (GENERATION, "eos_token_id", [], "eos_token_id []: expected at least one token"),
]
UNSUPPORTED += [(family, *case) for family in QWEN for case in OF_QWEN]
UNSUPPORTED += [(family, *case) for family in VISION_FAMILIES for case in OF_ALL]


@pytest.mark.parametrize(("family", "file", "key", "value", "message"), UNSUPPORTED)
def test_a_value_that_is_not_supported_is_refused(checkpoint, file, key, value, message):
    change(checkpoint / file, key.split("."), value)
    assert_refused(checkpoint, file, message)


LAST_OF_TOWER = {
    "internvl": "model.multi_modal_projector.linear_2.bias",
    "qwen2_5_vl": "model.visual.merger.mlp.2.bias",
    "qwen3_5": "model.visual.merger.linear_fc2.bias",
    "qwen3_vl": "model.visual.deepstack_merger_list.1.linear_fc2.bias",
}


@pytest.mark.parametrize(("family", "name"), LAST_OF_TOWER.items())
def test_a_missing_tensor_of_the_tower_is_refused(checkpoint, name):
    tensors = load_file(checkpoint / WEIGHTS)
    del tensors[name]
    save_file(tensors, checkpoint / WEIGHTS)
    assert_refused(checkpoint, WEIGHTS, f"tensor {name!r} is missing")


SHAPES = [
    ("internvl", "image_size", 60, "vision_tower.embeddings.position_embeddings", "1, 65, 32", "1, 101, 32"),
    ("internvl", "intermediate_size", 60, "vision_tower.encoder.layer.0.mlp.fc1.weight", "64, 32", "60, 32"),
    ("qwen2_5_vl", "intermediate_size", 60, "visual.blocks.0.mlp.gate_proj.weight", "40, 32", "60, 32"),
    ("qwen2_5_vl", "hidden_size", 64, "visual.patch_embed.proj.weight", "32, 3, 2, 8, 8", "64, 3, 2, 8, 8"),
    ("qwen3_vl", "num_position_embeddings", 25, "visual.pos_embed.weight", "36, 32", "25, 32"),
    ("qwen3_vl", "intermediate_size", 60, "visual.blocks.0.mlp.linear_fc1.weight", "64, 32", "60, 32"),
]


@pytest.mark.parametrize(("family", "key", "value", "name", "stored", "expected"), SHAPES)
def test_a_tensor_that_disagrees_with_the_config_is_refused(checkpoint, key, value, name, stored, expected):
    change(checkpoint / CONFIG, ["vision_config", key], value)
    if key == "image_size":
        change(checkpoint / CONFIG, ["image_seq_length"], 25)
        change(checkpoint / PROCESSOR, ["size"], {"height": value, "width": value})
    message = f"tensor 'model.{name}' has shape [{stored}], but by the config it is [{expected}]"
    assert_refused(checkpoint, WEIGHTS, message)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_shard_that_was_cut_is_refused(checkpoint):
    """The tower is in the second shard, which lacks its last byte."""
    tensors = load_file(checkpoint / WEIGHTS)
    (checkpoint / WEIGHTS).unlink()
    shards: dict[str, dict] = {f"model-0000{i}-of-00002.safetensors": {} for i in (1, 2)}
    first, second = shards
    for name, tensor in tensors.items():
        shards[second if "visual" in name or "vision" in name else first][name] = tensor
    for file, part in shards.items():
        save_file(part, checkpoint / file)
    places = {name: file for file, part in shards.items() for name in part}
    write_json(checkpoint / f"{WEIGHTS}.index.json", {"weight_map": places})
    size = (checkpoint / second).stat().st_size
    with (checkpoint / second).open("r+b") as file:
        file.truncate(size - 1)
    assert_refused(checkpoint, second, f"the file has {size} bytes, but it has {size - 1}")


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_and_its_hidden_states_in_fp16_are_close_to_fp32(checkpoint, tmp_path):
    """Layer 0 has the rows of the tower."""
    layers = json.loads((checkpoint / CONFIG).read_text())["text_config"]["num_hidden_layers"]
    request = LLMGenerationRequest("go", images=(make_image(66, 130),), sampling=SamplingParams(max_tokens=1))
    states = {}
    for precision in ("fp32", "fp16"):
        export(checkpoint, tmp_path / precision, precision=precision, hidden_state_layers=(layers,))
        with LLMInferenceRuntime(tmp_path / precision) as runtime:
            runtime.handle_request(request, output_thinker_embeddings=True)
            states[precision] = [runtime.base_model_hidden_states(i).array.copy() for i in (0, layers)]
    for expected, found in zip(states["fp32"], states["fp16"], strict=True):
        assert found.dtype == np.float16
        assert expected.std() > 0.1
        np.testing.assert_allclose(found, expected, atol=2e-2 * np.abs(expected).max())
