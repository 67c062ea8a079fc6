# SPDX-License-Identifier: Apache-2.0
"""What the text families read, and what they refuse.

test/parity compares them with transformers.
"""

from __future__ import annotations

import json

import onnx
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.families import llama, qwen2, qwen3
from edgellm_ros.builder.model.decoder import Attention, Decoder
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.decoder_checkpoint import CONFIGS, SIZES, write_decoder_checkpoint
from fixtures.tiny_checkpoint import CHAT_TEMPLATE, write_json

pytestmark = pytest.mark.only_on("cpu", reason="the export is the same for every device")
LIMITS = {"max_input_len": 64, "max_kv_cache_capacity": 96}


def section(model_type: str, **changes) -> ConfigSection:
    """Make a configuration; `...` removes a key."""
    config = {"model_type": model_type, "vocab_size": 100, **SIZES, **CONFIGS[model_type], **changes}
    return ConfigSection({key: value for key, value in config.items() if value is not ...}, "config.json")


def operators(path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def windows_of(decoder: Decoder) -> tuple[int | None, ...]:
    """Return the sliding window of each attention block."""
    return tuple(block.window for block in decoder.blocks if isinstance(block, Attention))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_checkpoint_is_exported_and_answers(tmp_path, model_type):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", model_type)
    config = export(checkpoint, tmp_path / "engine", **LIMITS)
    assert config.model_type == model_type
    assert (tmp_path / "engine" / "llm" / "model.cuda.onnx").is_file()
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        request = LLMGenerationRequest("hello", sampling=SamplingParams(max_tokens=8))
        assert runtime.handle_request(request).token_ids


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, 32, 32)),
        ({"max_window_layers": 0}, (32, 32, 32)),
        ({"max_window_layers": ...}, (None,) * 3),  # 28 is the model code's
        ({"use_sliding_window": False}, (None,) * 3),
        ({"use_sliding_window": ...}, (None,) * 3),
        ({"sliding_window": None}, (None,) * 3),
        ({"sliding_window": ...}, (None, 4096, 4096)),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (32, None, None)),
    ],
)
@pytest.mark.parametrize("family", [qwen2, qwen3], ids=["qwen2", "qwen3"])
def test_sliding_windows_of_qwen_are_those_of_the_model_code(family, changes, windows):
    model_type = family.FAMILY.name
    assert windows_of(family.read_decoder(section(model_type, **changes))) == windows


@pytest.mark.parametrize(("value", "window"), [(32, 32), (None, None), (..., 4096)])
def test_mistral_has_one_window_in_all_layers(value, window):
    assert windows_of(llama.read_decoder(section("mistral", sliding_window=value))) == (window,) * 3


def test_llama_ignores_sliding_windows_as_the_model_code_does():
    assert windows_of(llama.read_decoder(section("llama", sliding_window=32))) == (None,) * 3


@pytest.mark.parametrize(
    ("family", "model_type", "kv_heads", "head_dim"),
    [(qwen2, "qwen2", 32, 2), (qwen3, "qwen3", 32, 128), (llama, "llama", 32, 2), (llama, "mistral", 8, 2)],
)
def test_keys_that_are_left_out_have_the_model_code_s_defaults(family, model_type, kv_heads, head_dim):
    left_out = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"), ...)
    decoder = family.read_decoder(section(model_type, num_attention_heads=32, **left_out))
    assert (decoder.config.num_key_value_heads, decoder.config.head_dim) == (kv_heads, head_dim)
    assert (decoder.norm.epsilon, decoder.config.rope.theta) == (1e-6, 10000)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu': supported: silu"),
        ("qwen3", {"layer_types": ["full_attention"]}, r"layer_types .*: expected a list of 3 types"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not supported"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            "sliding_attention needs use_sliding_window",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window 0: expected at least 1"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5: .*whole heads, supported: 1"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "type 'dynamic': supported: default"),
        ("llama", {"head_dim": 15}, "head_dim must be even, got 15"),
    ],
)
def test_a_value_that_is_not_supported_is_named(tmp_path, model_type, changes, message):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", model_type)
    config = json.loads((checkpoint / "config.json").read_text())
    write_json(checkpoint / "config.json", config | changes)
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        export(checkpoint, tmp_path / "engine", **LIMITS)


def test_longrope_beyond_its_first_training_is_refused(tmp_path):
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 16.0}
    rope |= {"original_max_position_embeddings": 80}
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama", rope_parameters=rope)
    message = "max_kv_cache_capacity 96 exceeds the model's original_max_position_embeddings, up to .* 80"
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / "engine", **LIMITS)
    export(checkpoint, tmp_path / "engine", max_input_len=64, max_kv_cache_capacity=80)


def test_a_window_as_large_as_the_cache_leaves_the_mask_as_it_is(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "qwen2", sliding_window=96)
    for capacity, windows in ((96, 0), (97, 1)):  # one mask for both layers that have the window
        export(checkpoint, tmp_path / "engine", max_input_len=64, max_kv_cache_capacity=capacity)
        assert operators(tmp_path / "engine" / "llm" / "model.onnx").count("And") == windows


def test_a_chat_template_is_taken_from_the_tokenizer_s_config(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    (checkpoint / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT_TEMPLATE}]
    for template in (CHAT_TEMPLATE, named):
        write_json(checkpoint / "tokenizer_config.json", {"chat_template": template})
        export(checkpoint, tmp_path / "engine", **LIMITS)
        assert (tmp_path / "engine" / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_several_chat_templates_without_a_default_are_refused(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    (checkpoint / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}]
    write_json(checkpoint / "tokenizer_config.json", {"chat_template": named})
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config\.json has no chat_template"):
        export(checkpoint, tmp_path / "engine", **LIMITS)


def test_a_token_that_the_post_processor_would_add_is_not_added(tmp_path):
    """Chat templates begin with the bos token themselves."""
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    bos = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<|endoftext|>")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [bos], "tokens": ["<|endoftext|>"]}
        },
    }
    write_json(checkpoint / "tokenizer.json", tokenizer)
    template = checkpoint / "chat_template.jinja"
    template.write_text("{{ bos_token }}" + CHAT_TEMPLATE)
    write_json(checkpoint / "tokenizer_config.json", {"bos_token": "<|endoftext|>"})
    export(checkpoint, tmp_path / "engine", **LIMITS)
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        runtime.handle_request(LLMGenerationRequest("hi", sampling=SamplingParams(max_tokens=1)))
        assert runtime.base_model_input_token_ids[0].count(bos) == 1


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("heads", [10**6, 2**31 - 1])
def test_a_huge_number_of_heads_is_not_blamed_on_the_head_size(tmp_path, model_type, heads):
    changes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": None}
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", model_type)
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    write_json(checkpoint / "config.json", config)
    expected = rf"config\.json: num_attention_heads {heads}: expected at most hidden_size \d+ without"
    with pytest.raises(ValueError, match=expected):
        export(checkpoint, tmp_path / "engine", **LIMITS)
