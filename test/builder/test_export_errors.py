# SPDX-License-Identifier: Apache-2.0
"""Errors of `export` name what is missing, damaged or unsupported in a checkpoint."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from fixtures.changed_json import change
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return write_tiny_checkpoint(tmp_path / "checkpoint", shards=1)


CONFIG_ERRORS = [
    (
        "model_type",
        "gpt2",
        "model_type 'gpt2': supported: alpamayo1_5, alpamayo_r1, internvl, llama, mimo, mistral",
    ),
    ("model_type", ..., "key 'model_type' is missing"),
    ("model_type", ["llama"], "model_type ['llama']: expected a string"),
    (
        "text_config.num_experts",
        128,
        "num_experts 128: a mixture of experts, only dense layers are supported; layer 0 has experts",
    ),
    ("text_config.num_experts", ..., "only dense layers"),
    ("text_config.hidden_act", "gelu", "hidden_act 'gelu': supported: silu"),
    ("text_config.sliding_window", 512, "sliding_window 512: only full attention"),
    ("text_config.hidden_size", ..., "text_config: key 'hidden_size' is missing"),
    ("text_config.hidden_size", "48", "hidden_size '48': expected an integer"),
    ("text_config.rms_norm_eps", True, "rms_norm_eps True: expected a number"),
    ("text_config.rms_norm_eps", -1e-6, "rms_norm_eps -1e-06: expected at least 0"),
    ("text_config.rms_norm_eps", float("inf"), "rms_norm_eps inf: expected finite numbers"),
    ("text_config.rms_norm_eps", 10**400, "expected finite numbers"),
    ("text_config.num_attention_heads", 0, "num_attention_heads 0: expected at least 1"),
    ("text_config.num_key_value_heads", 3, "not a multiple of"),
    (
        "text_config.rope_parameters.rope_type",
        "dynamic",
        "rope_type 'dynamic': supported: default, linear, llama3, yarn, longrope, proportional",
    ),
    ("text_config.rope_parameters.mrope_section", [4, 4, 4], "mrope_section"),
    ("text_config.rope_parameters.mrope_interleaved", False, "mrope_interleaved"),
    ("text_config.intermediate_size", 96, "model.layers.0.mlp.gate_proj.weight' has shape"),
    ("text_config.num_hidden_layers", 2, "num_hidden_layers 3: the language model"),
    ("text_config.num_hidden_layers", 1, "num_hidden_layers 1: expected at least the 2 deepstack features"),
    ("vision_config.depth", 4, "depth 4: the last layer in model.safetensors is 'visual.blocks.2'"),
    ("vision_config.hidden_act", "relu", "hidden_act 'relu': supported: gelu_pytorch_tanh"),
    ("vision_config.depth", True, "depth True: expected an integer"),
    ("vision_config.deepstack_visual_indexes", [0, 9], "deepstack_visual_indexes"),
    ("vision_config.out_hidden_size", 64, "vision out_hidden_size 64 is not"),
    ("audio_config.encoder_layers", 3, "encoder_layers 3: the last layer in model.safetensors is 'audio"),
    ("audio_config.encoder_ffn_dim", 64, "audio_tower.layers.0.fc1.weight' has shape"),
    ("audio_config.downsample_hidden_size", 8, "audio_tower.conv2d1.weight' has shape"),
    ("audio_config.activation_function", "relu", "activation_function 'relu': supported: gelu"),
    ("audio_config.n_window", 100, "n_window 100: supported: 50"),
    ("audio_config.num_mel_bins", 80, "feature_size 128: supported: 80"),
    ("audio_config.output_dim", 64, "audio output_dim 64 is not"),
    ("audio_token_id", ..., "needs audio_token_id"),
    ("image_token_id", 9999, "image_token_id 9999: outside the vocabulary"),
]


@pytest.mark.parametrize(("key", "value", "message"), CONFIG_ERRORS)
def test_config_value_that_is_not_supported(checkpoint, tmp_path, key, value, message):
    change(checkpoint / "config.json", key.split("."), value)
    with pytest.raises(ValueError, match=re.escape(message)):
        export(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({"num_experts": 8, "mlp_only_layers": [0, 2]}, 1),
        ({"num_experts": 8, "decoder_sparse_step": 2}, 1),
        ({"num_experts": 8, "mlp_only_layers": [0, 1], "decoder_sparse_step": 3}, 2),
    ],
)
def test_the_first_layer_with_experts_is_named(checkpoint, tmp_path, changes, layer):
    for key, value in changes.items():
        change(checkpoint / "config.json", ["text_config", key], value)
    with pytest.raises(ValueError, match=f"num_experts 8: a mixture .*; layer {layer} has experts"):
        export(checkpoint, tmp_path / "engine")


EXPERT_ERRORS = [
    ("model_type", "pi0", "model_type must be 'edgellm_flow_expert', got 'pi0'"),
    ("num_hidden_layers", 2, "num_hidden_layers 2: the language model"),
    ("head_dim", 32, "head_dim 32: the language model"),
    ("rope_theta", 5e5, "rope_theta 500000.0: the language model"),
    ("time_max_period", ..., "missing key 'time_max_period'"),
    ("momentum", 0.9, "unknown key 'momentum'"),
    ("action_space.type", "holonomic", "action space type must be 'unicycle'"),
    ("future_start_token_id", 9999, "token id 9999 is outside the vocabulary"),
]


@pytest.mark.parametrize(("key", "value", "message"), EXPERT_ERRORS)
def test_expert_that_does_not_fit(checkpoint, tmp_path, key, value, message):
    change(checkpoint / "action_expert" / "config.json", key.split("."), value)
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / "engine")


PROCESSOR_ERRORS = [
    ("image_processor_type", "CLIPImageProcessor", "image_processor_type 'CLIPImageProcessor': supported"),
    ("patch_size", 14, "patch_size 14: supported: 8"),
    ("resample", 2, "resample 2: supported: 3"),
    ("do_normalize", False, "do_normalize False"),
    ("image_mean", ..., "key 'image_mean' is missing"),
    ("size", {"height": 64}, "size: key 'shortest_edge' is missing"),
    ("feature_extractor_type", ..., "feature_extractor_type None: supported: WhisperFeatureExtractor"),
    ("sampling_rate", 8000, "sampling_rate 8000: supported: 16000"),
    ("dither", 0.1, "dither 0.1: supported: 0"),
    ("n_fft", 401, "n_fft must be even"),
]


@pytest.mark.parametrize(("key", "value", "message"), PROCESSOR_ERRORS)
def test_processor_that_is_not_supported(checkpoint, tmp_path, key, value, message):
    change(checkpoint / "preprocessor_config.json", [key], value)
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / "engine")


def test_a_mixture_of_experts_of_an_unknown_family_is_refused_with_its_size(checkpoint, tmp_path):
    """`thinker_config` is where a published Qwen3-Omni has its text model."""
    data = json.loads((checkpoint / "config.json").read_text())
    text = data["text_config"] | {"num_experts": 128}
    nested = {"model_type": "foreign_moe", "thinker_config": {"text_config": text}}
    write_json(checkpoint / "config.json", nested)
    values = sum(tensor.size for tensor in load_file(checkpoint / "model.safetensors").values())
    expected = (
        "config.json: thinker_config.text_config: num_experts 128: a mixture of experts, only dense models "
        "are supported; model_type 'foreign_moe' is not supported either; the checkpoint has "
        f"{values / 1e9:.3g} billion parameters"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        export(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize("key", ["num_local_experts", "n_routed_experts"])
def test_other_names_of_experts_are_known(checkpoint, tmp_path, key):
    write_json(checkpoint / "config.json", {"model_type": "foreign", key: 8})
    (checkpoint / "model.safetensors").unlink()  # then its size is not told
    with pytest.raises(ValueError, match=f"{key} 8: a mixture of experts.* is not supported either$"):
        export(checkpoint, tmp_path / "engine")


def test_an_unknown_family_is_refused_with_the_nearest_known_one(checkpoint, tmp_path):
    change(checkpoint / "config.json", ["model_type"], "qwen3_omni_thinker")
    expected = r"model_type 'qwen3_omni_thinker': supported: .*; the nearest is qwen3_omni_moe_thinker$"
    with pytest.raises(ValueError, match=expected):
        export(checkpoint, tmp_path / "engine")


QUANTISED = [
    ({"quant_method": "bitsandbytes", "bits": 4}, "quant_method 'bitsandbytes', bits 4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    ({"load_in_4bit": True}, "{'load_in_4bit': True}"),
    ("int4", "'int4'"),
]


@pytest.mark.parametrize(("method", "name"), QUANTISED)
@pytest.mark.parametrize("place", [[], ["text_config"]])
def test_a_checkpoint_quantised_by_another_method_is_refused_by_its_name(
    checkpoint, tmp_path, method, name, place
):
    change(checkpoint / "config.json", [*place, "quantization_config"], method)
    message = rf"config\.json: .*quantization_config.*{re.escape(name)}.*supported"
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / "engine")


def test_a_quantised_checkpoint_without_quantised_layers_is_refused(checkpoint, tmp_path):
    method = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    change(checkpoint / "config.json", ["quantization_config"], method)
    with pytest.raises(ValueError, match=r"model\.safetensors: no layer is quantised, but the config says"):
        export(checkpoint, tmp_path / "engine")


def test_an_algorithm_of_model_optimizer_that_is_not_supported_is_refused(checkpoint, tmp_path):
    write_json(checkpoint / "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantization: .*quant_algo 'NVFP4'"):
        export(checkpoint, tmp_path / "engine")


def test_an_empty_quantization_config_is_none(checkpoint, tmp_path):
    change(checkpoint / "config.json", ["quantization_config"], None)
    export(checkpoint, tmp_path / "engine")


OTHER_FORMATS = [
    ("pytorch_model.bin", "pytorch_model.bin has PyTorch pickles, which can run code"),
    ("pytorch_model-00001-of-00002.bin", "pytorch_model-00001-of-00002.bin has PyTorch pickles"),
    ("model-q4_0.gguf", "model-q4_0.gguf has weights of llama.cpp"),
    ("consolidated.safetensors", "consolidated.safetensors has weights in Mistral's own format"),
]


@pytest.mark.parametrize(("name", "message"), OTHER_FORMATS)
def test_weights_in_another_format_are_refused_with_advice(checkpoint, tmp_path, name, message):
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    expected = rf"model\.safetensors not found; {re.escape(message)}"
    with pytest.raises(FileNotFoundError, match=expected):
        export(checkpoint, tmp_path / "engine")


def test_layers_of_another_name_are_refused_with_the_file_and_a_longer_name(checkpoint, tmp_path):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    save_file({f"thinker.{name}": tensor for name, tensor in tensors.items()}, path)
    expected = (
        "text_config: num_hidden_layers 3: model.safetensors has no tensors of 'model.layers.0', but "
        "'thinker.model.layers.0.input_layernorm.weight'"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        export(checkpoint, tmp_path / "engine")


def test_a_tensor_of_another_shape_is_refused_with_the_shard(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", shards=3)
    change(checkpoint / "config.json", ["text_config", "vocab_size"], 310)
    expected = (
        r"model-00001-of-00003\.safetensors: tensor 'lm_head\.weight' has shape \[302, 48\], but by the "
        r"config it is \[310, 48\]"
    )
    with pytest.raises(ValueError, match=expected):
        export(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize("cut", [1, 100_000])
def test_truncated_weights_are_an_error_that_says_so(checkpoint, tmp_path, cut):
    path = checkpoint / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    expected = f"cut short: by its header the file has {size} bytes, but it has {size - cut}"
    with pytest.raises(ValueError, match=expected):
        export(checkpoint, tmp_path / "engine")


def test_a_shard_that_is_cut_is_named(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", shards=3)
    shard = checkpoint / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors: damaged or cut short"):
        export(checkpoint, tmp_path / "engine")


def test_missing_shard_is_named(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", shards=3)
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003.safetensors not found"):
        export(checkpoint, tmp_path / "engine")


def test_tensor_missing_from_its_shard_is_named(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", shards=2)
    index = checkpoint / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = weight_map["model.norm.weight"]
    tensors = load_file(checkpoint / shard)
    del tensors["model.norm.weight"]
    save_file(tensors, checkpoint / shard)
    with pytest.raises(ValueError, match=rf"{shard}: tensor 'model.norm.weight' is missing"):
        export(checkpoint, tmp_path / "engine")


WEIGHT_MAPS = [
    ({}, "weight_map is missing or empty"),
    (["model.safetensors"], "weight_map is missing or empty"),
    ({"model.norm.weight": 3}, "weight_map: model.norm.weight 3: expected the name of a file beside it"),
    ({"a": "../b.safetensors"}, "weight_map: a '../b.safetensors': expected the name of a file beside it"),
]


@pytest.mark.parametrize(("weight_map", "message"), WEIGHT_MAPS)
def test_an_index_that_names_no_files_is_refused(checkpoint, tmp_path, weight_map, message):
    write_json(checkpoint / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(ValueError, match=rf"safetensors\.index\.json: {re.escape(message)}"):
        export(checkpoint, tmp_path / "engine")


def test_quantised_weights_are_refused(checkpoint, tmp_path):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = np.zeros(tensors["lm_head.weight"].shape, np.int8)
    save_file(tensors, checkpoint / "model.safetensors")
    expected = "model.safetensors: tensor 'lm_head.weight' has dtype I8; supported: F16, BF16, F32"
    with pytest.raises(ValueError, match=re.escape(expected)):
        export(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "preprocessor_config.json", "chat_template.jinja"]
)
def test_missing_file_is_named(checkpoint, tmp_path, name):
    (checkpoint / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        export(checkpoint, tmp_path / "engine")


def test_file_that_is_not_json_is_named(checkpoint, tmp_path):
    (checkpoint / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        export(checkpoint, tmp_path / "engine")


def test_checkpoint_that_never_stops_is_refused(checkpoint, tmp_path):
    (checkpoint / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="eos_token_id: no answer would end"):
        export(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4"}, "precision must be one of fp32, fp16, bf16, got 'int4'"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0"),
        ({"max_input_len": 448}, "max_kv_cache_capacity 448 must be greater than max_input_len 448"),
        ({"max_kv_cache_capacity": 4096}, "max_kv_cache_capacity 4096 exceeds the model's"),
        ({"max_lora_rank": -1}, "max_lora_rank must not be negative, got -1"),
        ({"hidden_state_layers": (1, 4)}, r"hidden_state_layers \[1, 4\]: the language model has 3 layers"),
        ({"hidden_state_layers": (0,)}, r"hidden_state_layers must be rising numbers from 1, got \[0\]"),
        ({"vocab_map": "nowhere.safetensors"}, r"nowhere\.safetensors not found"),
    ],
)
def test_option_out_of_range(tiny_checkpoint, tmp_path, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        export(tiny_checkpoint, tmp_path, **options)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"map": np.arange(300)}, "expected a tensor 'vocab_map', found map"),
        ({"vocab_map": np.arange(300).reshape(2, 150)}, r"must be integers \[V\], got int64 \[2, 150\]"),
        ({"vocab_map": np.arange(300.0)}, r"must be integers \[V\], got float64 \[300\]"),
        ({"vocab_map": np.arange(303)}, "token 302 is outside the vocabulary of 302"),
        ({"vocab_map": np.array([-1, 5])}, "token -1 is outside the vocabulary"),
        ({"vocab_map": np.arange(258)}, r"lacks the stop tokens \[258, 269\]: no answer would end"),
    ],
)
def test_vocabulary_map_that_cannot_be_used(tiny_checkpoint, tmp_path, tensors, message):
    path = tmp_path / "map.safetensors"
    save_file(tensors, path)
    with pytest.raises(ValueError, match="map.safetensors: .*" + message):
        export(tiny_checkpoint, tmp_path / "engine", vocab_map=path)


def test_vocabulary_map_that_is_no_safetensors_file(tiny_checkpoint, tmp_path):
    path = tmp_path / "map.safetensors"
    path.write_text("1, 2, 3")
    with pytest.raises(ValueError, match=r"map\.safetensors: not a readable safetensors file"):
        export(tiny_checkpoint, tmp_path / "engine", vocab_map=path)


def test_failed_check_leaves_the_old_engine_alone(tiny_checkpoint, tmp_path):
    engine = tmp_path / "engine"
    before = export(tiny_checkpoint, engine)
    broken = shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    change(broken / "config.json", ["text_config", "hidden_act"], "gelu")
    with pytest.raises(ValueError, match="hidden_act"):
        export(broken, engine)
    assert before.load(engine, verify=True) == before
