# SPDX-License-Identifier: Apache-2.0
"""Sizes of a configuration that no tensor of the checkpoint has are refused.

The refusal comes before any computation with them.
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from fixtures.changed_json import change
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.qwen2_5_omni_checkpoint import write_qwen2_5_omni
from fixtures.qwen3_vl_checkpoint import write_whole_omni_checkpoint
from fixtures.tiny_checkpoint import write_tiny_checkpoint
from fixtures.vision_families import VISION_FAMILIES

pytestmark = pytest.mark.only_on("cpu", reason="the export is the same for every device")
HUGE = 1_000_000  # if nothing refuses it, a list of that many entries does not fill the memory

WRITERS = {
    **{name: partial(write_decoder_checkpoint, model_type=name) for name in ("llama", "mistral")},
    **{name: partial(write_decoder_checkpoint, model_type=name) for name in ("qwen2", "qwen3")},
    **VISION_FAMILIES,
    "nemotron_h": write_nemotron_h_checkpoint,
    "qwen3_5_text": write_qwen3_5_checkpoint,
    "qwen3_omni": partial(write_tiny_checkpoint, shards=1),
    "qwen2_5_omni": write_qwen2_5_omni,
    "whole_qwen3_omni": write_whole_omni_checkpoint,
}
# Checkpoint, list of layers in the configuration, list of modules, layers of the checkpoint.
LAYERS = [
    ("llama", "num_hidden_layers", "model.layers", 3),
    ("mistral", "num_hidden_layers", "model.layers", 3),
    ("qwen2", "num_hidden_layers", "model.layers", 3),
    ("qwen3", "num_hidden_layers", "model.layers", 3),
    ("qwen3_5_text", "num_hidden_layers", "model.layers", 4),
    ("qwen3_5", "text_config.num_hidden_layers", "model.language_model.layers", 4),
    ("qwen3_5", "vision_config.depth", "model.visual.blocks", 3),
    ("qwen3_vl", "text_config.num_hidden_layers", "model.language_model.layers", 3),
    ("qwen3_vl", "vision_config.depth", "model.visual.blocks", 3),
    ("qwen2_5_vl", "text_config.num_hidden_layers", "model.language_model.layers", 3),
    ("qwen2_5_vl", "vision_config.depth", "model.visual.blocks", 3),
    ("internvl", "text_config.num_hidden_layers", "model.language_model.layers", 2),
    ("internvl", "vision_config.num_hidden_layers", "model.vision_tower.encoder.layer", 2),
    ("qwen3_omni", "text_config.num_hidden_layers", "model.layers", 3),
    ("qwen3_omni", "vision_config.depth", "visual.blocks", 3),
    ("qwen3_omni", "audio_config.encoder_layers", "audio_tower.layers", 2),
    ("qwen2_5_omni", "thinker_config.text_config.num_hidden_layers", "thinker.model.layers", 2),
    ("qwen2_5_omni", "thinker_config.vision_config.depth", "thinker.visual.blocks", 3),
    ("qwen2_5_omni", "thinker_config.audio_config.encoder_layers", "thinker.audio_tower.layers", 2),
    ("whole_qwen3_omni", "thinker_config.text_config.num_hidden_layers", "thinker.model.layers", 3),
]
# Checkpoint, key, largest dimension of its tensors.
DIMENSIONS = [
    ("llama", "hidden_size", 302),  # of which the size of a head is a share
    ("mistral", "head_dim", 302),
    ("qwen2", "hidden_size", 302),
    ("qwen3", "head_dim", 302),
    ("nemotron_h", "head_dim", 388),
    ("nemotron_h", "attention_head_dim", 388),
    ("qwen3_5", "text_config.head_dim", 302),
    ("qwen3_vl", "text_config.head_dim", 302),
    ("qwen2_5_vl", "text_config.hidden_size", 302),
    ("internvl", "text_config.hidden_size", 306),
    ("qwen2_5_omni", "thinker_config.text_config.hidden_size", 309),
    ("qwen3_omni", "text_config.head_dim", 302),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    return {name: write(folder / name) for name, write in WRITERS.items()}


@pytest.fixture
def checkpoint(written, name, tmp_path) -> Path:
    return shutil.copytree(written[name], tmp_path / "checkpoint")


def assert_refused(checkpoint: Path, key: str, message: str, file: str = "config.json") -> None:
    """Check that a huge value of a key is refused with file, key, value and message."""
    *sections, last = key.split(".")
    change(checkpoint / file, [*sections, last], HUGE)
    where = f"{checkpoint / file}: " + (f"{'.'.join(sections)}: " if sections else "")
    with pytest.raises(ValueError, match=f"^{re.escape(f'{where}{last} {HUGE}: {message}')}$"):
        plan_export(checkpoint, ExportOptions())


@pytest.mark.parametrize(("name", "key", "modules", "layers"), LAYERS)
def test_more_layers_than_the_checkpoint_has_are_refused(checkpoint, key, modules, layers):
    assert_refused(checkpoint, key, f"the last layer in model.safetensors is '{modules}.{layers - 1}'")


@pytest.mark.parametrize(("name", "key", "largest"), DIMENSIONS)
def test_a_size_above_all_dimensions_of_the_tensors_is_refused(checkpoint, key, largest):
    assert_refused(checkpoint, key, f"model.safetensors has no tensor with a dimension above {largest}")


@pytest.mark.parametrize("name", ["qwen3_omni"])
def test_layers_are_compared_before_a_layer_with_experts_is_looked_for(checkpoint):
    for key, value in (("num_experts", 8), ("decoder_sparse_step", 2 * HUGE)):
        change(checkpoint / "config.json", ["text_config", key], value)
    has = "the last layer in model.safetensors is 'model.layers.2'"
    assert_refused(checkpoint, "text_config.num_hidden_layers", has)


@pytest.mark.parametrize("name", ["qwen3_omni"])
def test_time_features_of_an_action_expert_are_compared_with_its_tensor(checkpoint):
    expert = checkpoint / "action_expert"
    size = 10**15  # a list of that many frequencies fits in no address space
    change(expert / "config.json", ["time_embedding_dim"], size)
    expected = (
        f"{expert / 'model.safetensors'}: tensor 'time_mlp.0.weight' has shape [32, 16], but by the config "
        f"it is [32, {size}]"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        plan_export(checkpoint, ExportOptions())


@pytest.mark.parametrize("name", ["qwen3_omni"])
def test_an_integer_of_an_action_expert_beyond_64_bits_is_refused(checkpoint):
    path = checkpoint / "action_expert" / "config.json"
    change(path, ["action_space", "horizon"], 2**63)
    expected = f"{path}.action_space.horizon: expected an integer of 64 bits, got {2**63}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        plan_export(checkpoint, ExportOptions())


@pytest.mark.parametrize("name", ["qwen2_5_vl"])
def test_a_size_beyond_32_bits_that_no_tensor_has_is_refused(checkpoint):
    change(checkpoint / "config.json", ["vision_config", "window_size"], 2**31)
    expected = f"vision_config: window_size {2**31}: expected at most {2**31 - 1}"
    with pytest.raises(ValueError, match=f"{re.escape(expected)}$"):
        plan_export(checkpoint, ExportOptions())
