# SPDX-License-Identifier: Apache-2.0
"""`draft/fused.json`: where the fused kernels find the weights of a draft head."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder import export
from edgellm_ros.fused.description.draft import FUSED_DRAFT_FILE, FusedDraftModel
from fixtures.decoder_checkpoint import lm_head_columns, write_decoder_checkpoint
from fixtures.random_head import base_config, write_random_head

pytestmark = pytest.mark.only_on("cpu", reason="files are the same for every device")
LIMITS = {"max_input_len": 16, "max_kv_cache_capacity": 32, "max_verify_tree_size": 8}
QKV = [f"self_attn.{name}_proj" for name in "qkv"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that exports a head of these options in fp16.

    The function returns the head's tensors, its description and the engine.
    """
    checkpoint = write_decoder_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint", "llama")
    found = {}

    def make(**options):
        key = json.dumps(options)
        if key not in found:
            root = tmp_path_factory.mktemp("draft")
            head = write_random_head(root / "head", base_config(checkpoint), **options)
            export(checkpoint, root / "engine", precision="fp16", draft=head, **LIMITS)
            tensors = load_file(head / "model.safetensors")
            model = FusedDraftModel.load(root / "engine" / FUSED_DRAFT_FILE)
            found[key] = tensors, model, root / "engine"
        return found[key]

    make.base = load_file(checkpoint / "model.safetensors")
    return make


def assert_stored(engine, file, weight, expected) -> None:
    """Compare a weight at its place in a file of weights with the checkpoint's."""
    contents = (engine / file).read_bytes()
    found = np.frombuffer(contents, np.float16, weight.size, weight.offset).reshape(weight.shape)
    np.testing.assert_array_equal(found, expected.astype(np.float16))


def joined(tensors, module, names) -> np.ndarray:
    return np.concatenate([tensors[f"{module}.{name}.weight"].T for name in names], axis=1)


BIASES = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("options", [{}, {"layers": 2, "head_norms": True, "biases": BIASES}])
def test_every_place_of_a_layer_holds_the_heads_weights(exported, options):
    tensors, model, engine = exported(**options)
    file = f"draft/{model.file}"
    for i, layer in enumerate(model.layers):
        module = f"layers.{i}" if i else "midlayer"
        assert layer.qkv.shape[0] == (1 if i else 2) * 64
        assert_stored(engine, file, layer.qkv, joined(tensors, module, QKV))
        assert_stored(engine, file, layer.gate_up, joined(tensors, module, ["mlp.gate_proj", "mlp.up_proj"]))
        assert_stored(engine, file, layer.down, joined(tensors, module, ["mlp.down_proj"]))
        assert_stored(engine, file, layer.input_norm, tensors[f"{module}.input_layernorm.weight"])
        assert (layer.q_norm is not None) == bool(options.get("head_norms"))
        assert (layer.o_bias is not None) == bool(options.get("biases"))
        if layer.o_bias is not None:
            assert_stored(engine, file, layer.o_bias, tensors[f"{module}.self_attn.o_proj.bias"])
    assert_stored(engine, file, model.hidden_norm, tensors["midlayer.hidden_norm.weight"])
    assert_stored(engine, file, model.norm, tensors["norm.weight"])
    assert_stored(engine, file, model.lm_head, tensors["lm_head.weight"].T)


def test_the_fusion_is_in_the_file_of_the_verifying_graph(exported):
    tensors, model, engine = exported(fc_norm=True, fc_bias=True)
    file = f"llm/{model.fusion.file}"
    assert_stored(engine, file, model.fusion.fc, tensors["fc.weight"].T)
    assert_stored(engine, file, model.fusion.fc_bias, tensors["fc.bias"])
    for i, norm in enumerate(model.fusion.state_norms):
        assert_stored(engine, file, norm, tensors[f"fc_norm.{i}.weight"])
    assert (len(model.fusion.state_norms), model.fusion.joined_norm) == (3, None)


def test_a_joined_norm_and_a_normed_residual_are_told(exported):
    tensors, model, engine = exported(input_norm=True, norm_before_residual=True)
    assert_stored(engine, f"llm/{model.fusion.file}", model.fusion.joined_norm, tensors["input_norm.weight"])
    assert model.norm_before_residual
    assert not exported()[1].norm_before_residual


def test_a_head_without_an_lm_head_has_a_place_for_the_bases(exported):
    _, model, engine = exported(vocabulary=None)
    table = exported.base["model.embed_tokens.weight"]
    assert_stored(engine, f"draft/{model.file}", model.lm_head, lm_head_columns(table))


def test_an_export_in_fp32_removes_the_description_of_an_earlier_one(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    head = write_random_head(tmp_path / "head", base_config(checkpoint))
    export(checkpoint, tmp_path / "engine", precision="fp16", draft=head, **LIMITS)
    assert (tmp_path / "engine" / FUSED_DRAFT_FILE).exists()
    export(checkpoint, tmp_path / "engine", draft=head, **LIMITS)
    assert not (tmp_path / "engine" / FUSED_DRAFT_FILE).exists()


def test_a_damaged_description_is_refused_with_file_and_key(exported, tmp_path):
    data = json.loads((exported(fc_norm=True, fc_bias=True)[2] / FUSED_DRAFT_FILE).read_text())
    data["fusion"]["state_norms"].pop()
    (tmp_path / "fused.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"fused\.json\.fusion: state_norms must be 3 or none, got 2"):
        FusedDraftModel.load(tmp_path / "fused.json")
