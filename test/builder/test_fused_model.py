# SPDX-License-Identifier: Apache-2.0
"""`llm/fused.json`: where the fused kernels find the weights of a dense decoder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.fused.description.decoder import FUSED_FILE, FusedModel
from fixtures.decoder_checkpoint import lm_head_columns, write_decoder_checkpoint

LAYER = "model.layers.1"
JOINED = {  # field: (the checkpoint's tensors, side by side, transposed)
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "o": ("self_attn.o_proj.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
BIASES = {
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "o_bias": ("self_attn.o_proj.bias",),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down_bias": ("mlp.down_proj.bias",),
}
NORMS = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
HEAD_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that exports a model and returns its tensors and the engine.

    Arguments are the model type, options of the export, and changes of the checkpoint.
    """
    found = {}

    def make(model_type, options=(), **changes):
        key = model_type, tuple(options), tuple(changes.items())
        if key not in found:
            root = tmp_path_factory.mktemp(model_type)
            checkpoint = write_decoder_checkpoint(root / "checkpoint", model_type, **changes)
            export(checkpoint, root / "engine", **{"precision": "fp16", **dict(options)})
            found[key] = load_file(checkpoint / "model.safetensors"), root / "engine"
        return found[key]

    return make


def read(engine, weight):
    """Read a weight at its place in the file of weights."""
    contents = (engine / "llm" / FusedModel.load(engine / FUSED_FILE).file).read_bytes()
    return np.frombuffer(contents, np.float16, weight.size, weight.offset).reshape(weight.shape)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_every_place_holds_the_checkpoints_weights(exported, model_type):
    tensors, engine = exported(model_type)
    layer = FusedModel.load(engine / FUSED_FILE).layers[1]
    for field, names in JOINED.items():
        expected = np.concatenate([tensors[f"{LAYER}.{name}"].T for name in names], axis=1)
        np.testing.assert_array_equal(read(engine, getattr(layer, field)), expected.astype(np.float16))
    for field, names in BIASES.items():
        given = [tensors[f"{LAYER}.{name}"] for name in names if f"{LAYER}.{name}" in tensors]
        weight = getattr(layer, field)
        assert (weight is not None) == bool(given), field
        if weight is not None:
            np.testing.assert_array_equal(read(engine, weight), np.concatenate(given).astype(np.float16))
    for field, name in {**NORMS, **HEAD_NORMS}.items():
        weight = getattr(layer, field)
        assert (weight is not None) == (f"{LAYER}.{name}" in tensors), field
        if weight is not None:
            np.testing.assert_array_equal(read(engine, weight), tensors[f"{LAYER}.{name}"].astype(np.float16))


def test_a_window_is_that_of_its_layer_if_the_cache_is_longer(exported):
    windows = [layer.window for layer in FusedModel.load(exported("qwen3")[1] / FUSED_FILE).layers]
    assert windows == [None, 32, 32]
    _, engine = exported("qwen3", (("max_input_len", 16), ("max_kv_cache_capacity", 32)))
    assert [layer.window for layer in FusedModel.load(engine / FUSED_FILE).layers] == [None] * 3


def test_a_tied_lm_head_has_no_place(exported):
    model = FusedModel.load(exported("llama")[1] / FUSED_FILE)
    assert (model.tied, model.lm_head) == (True, None)


def test_an_lm_head_of_its_own_has_a_place(exported):
    tensors, engine = exported("llama", tie_word_embeddings=False)
    model = FusedModel.load(engine / FUSED_FILE)
    assert not model.tied
    expected = lm_head_columns(tensors["lm_head.weight"]).astype(np.float16)
    np.testing.assert_array_equal(read(engine, model.lm_head), expected)


def test_an_lm_head_that_is_an_input_has_no_place(exported):
    model = FusedModel.load(exported("llama", (("lm_head_input", True),))[1] / FUSED_FILE)
    assert (model.tied, model.lm_head) == (False, None)


def test_an_lm_head_for_a_part_of_the_vocabulary_has_a_place_though_it_is_tied(exported, tmp_path):
    tensors, engine = exported("llama")
    stop = json.loads((engine / "config.json").read_text())["stop_token_ids"][0]
    kept = np.unique([1, 5, 7, 9, stop]).astype(np.int32)
    save_file({"vocab_map": kept}, tmp_path / "map.safetensors")
    _, engine = exported("llama", (("vocab_map", tmp_path / "map.safetensors"),))
    model = FusedModel.load(engine / FUSED_FILE)
    assert not model.tied
    table = lm_head_columns(tensors["model.embed_tokens.weight"][kept]).astype(np.float16)
    np.testing.assert_array_equal(read(engine, model.lm_head), table)


def test_an_engine_in_fp32_has_no_description(exported):
    assert not (exported("llama", (("precision", "fp32"),))[1] / FUSED_FILE).exists()


def test_an_export_removes_the_description_of_an_earlier_one(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    export(checkpoint, tmp_path / "engine", precision="fp16")
    export(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine" / FUSED_FILE).exists()


def test_a_damaged_description_is_refused_with_file_and_key(exported, tmp_path):
    data = json.loads((exported("llama")[1] / FUSED_FILE).read_text())
    data["layers"][2]["qkv"]["offset"] = -1
    (tmp_path / "fused.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"fused\.json\.layers\[2\]\.qkv: .* has offset -1"):
        FusedModel.load(tmp_path / "fused.json")
