# SPDX-License-Identifier: Apache-2.0
"""Block drafters of DFlash: what is read, what is refused, what is exported."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.changed_json import change
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.dflash_checkpoints import write_drafter, write_qwen3_with_drafter

LIMITS = {"max_input_len": 64, "max_kv_cache_capacity": 96, "max_draft_tree_size": 16}


@pytest.fixture
def checkpoint(tmp_path):
    return write_qwen3_with_drafter(tmp_path / "checkpoint", num_hidden_layers=8)


def edit(checkpoint, **tensors) -> None:
    """Replace tensors of the drafter, `__` for a dot in names; None removes one."""
    path = checkpoint / "draft/model.safetensors"
    stored = load_file(path)
    for name, values in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if values is not None:
            stored[name.replace("__", ".")] = values
    save_file(stored, path)


def test_what_the_engine_says_of_a_drafter(checkpoint, tmp_path):
    config = export(checkpoint, tmp_path / "engine", **LIMITS)
    assert config == EngineConfig.load(tmp_path / "engine")
    draft = config.draft
    assert (draft.kind, draft.block_size, draft.mask_token_id) == ("dflash", 8, 5)
    assert draft.base_state_layers == (1, 7)
    assert (draft.num_layers, draft.head_dim, draft.shares_embedding) == (2, 16, True)
    files = {entry.path for entry in config.files}
    assert {"draft/model.onnx", "draft/context.onnx", "llm/verify.onnx"} <= files
    assert "draft/fused.json" not in files


def test_keys_at_top_level_are_those_of_the_section(checkpoint, tmp_path):
    path = checkpoint / "draft/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **config.pop("dflash_config")}))
    config = export(checkpoint, tmp_path / "engine", **LIMITS)
    assert (config.draft.mask_token_id, config.draft.base_state_layers) == (5, (1, 7))


@pytest.mark.parametrize(("layers", "count", "expected"), [(36, 5, (2, 10, 18, 26, 34)), (8, 1, (5,))])
def test_without_a_list_the_layers_are_spread_evenly(tmp_path, layers, count, expected):
    base = write_decoder_checkpoint(tmp_path / "checkpoint", "qwen3", num_hidden_layers=layers)
    section = {"mask_token_id": 5, "target_layer_ids": list(range(count))}
    changes = {"num_hidden_layers": count, "layer_types": None, "dflash_config": section}
    write_drafter(base / "draft", base, **changes)
    change(base / "draft/config.json", ["dflash_config", "target_layer_ids"], ...)
    assert export(base, tmp_path / "engine", **LIMITS).draft.base_state_layers == expected


def test_no_draft_leaves_the_drafter_out(checkpoint, tmp_path):
    config = export(checkpoint, tmp_path / "engine", with_draft=False, **LIMITS)
    assert config.draft is None
    assert not (tmp_path / "engine/draft").exists()


def test_the_log_says_what_was_read_and_what_it_weighs(checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    export(checkpoint, tmp_path / "engine", draft_vocab_size=40, **LIMITS)
    size = (checkpoint / "draft/model.safetensors").stat().st_size
    said = next(message for message in caplog.messages if "DFlash" in message)
    assert f"{size / 1e6:.1f} MB, blocks of 8, drafts " in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_target_layers": 9},
            "num_target_layers 9: the language model has 8: a drafter of another model",
        ),
        ({"hidden_size": 99}, "hidden_size 99: the language model has"),
        ({"vocab_size": 999}, "vocab_size 999: the language model has 302"),
        ({"block_size": 1}, "block_size 1: expected at least 2"),
        ({"block_size": 32}, "block_size must be from 2 to max_draft_tree_size 16, got 32"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': supported: silu"),
        ({"use_sliding_window": True}, "use_sliding_window True: supported: False"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types .* supported is full_attention"),
        ({"num_hidden_layers": 3}, "tensor 'layers.2.input_layernorm.weight' is missing"),
        ({"intermediate_size": 60}, "shape \\[48, 48\\], but by the config it is \\[48, 60\\]"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8': quantised weights"),
        ({"dflash_config": {"mask_token_id": 302}}, "mask_token_id 302: expected a token below 302"),
        ({"dflash_config": {}}, "key 'mask_token_id' is missing"),
        (
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 8]}},
            "target_layer_ids \\[1, 8\\]: expected rising layers from 0 to 7",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(checkpoint, tmp_path, changes, message):
    for key, value in changes.items():
        change(checkpoint / "draft/config.json", [key], value)
    with pytest.raises(ValueError, match=message) as error:
        export(checkpoint, tmp_path / "engine", **LIMITS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc__weight": None}, "tensor 'fc.weight' is missing"),
        ({"hidden_norm__weight": np.ones(3, np.float32)}, "tensor 'hidden_norm.weight' has shape \\[3\\]"),
        ({"markov__weight": np.ones(3, np.float32)}, "tensor 'markov.weight' is no part of a draft head"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(checkpoint, tmp_path, tensors, message):
    edit(checkpoint, **tensors)
    with pytest.raises(ValueError, match=message) as error:
        export(checkpoint, tmp_path / "engine", **LIMITS)
    assert "\n" not in str(error.value)


def test_a_drafter_without_its_base_is_refused(checkpoint, tmp_path):
    expected = r"tensor 'fc.weight': a draft head, not a language model; export .* with --draft"
    with pytest.raises(ValueError, match=expected):
        export(checkpoint / "draft", tmp_path / "engine")


def test_states_too_large_for_fc_in_fp16_give_the_rows_of_fp32(checkpoint, tmp_path):
    fc = load_file(checkpoint / "draft/model.safetensors")["fc.weight"]
    edit(checkpoint, fc__weight=np.abs(fc))  # sums beyond 65504
    rng, found = np.random.default_rng(0), {}
    states = rng.uniform(1e4, 3e4, (2, 1, 3, fc.shape[0])).astype(np.float16)
    for precision in ("fp32", "fp16"):
        config = export(checkpoint, tmp_path / precision, precision=precision, **LIMITS)
        draft, dtype = config.draft, np.float32 if precision == "fp32" else np.float16
        shape = (1, draft.num_key_value_heads, draft.cache_capacity(96), draft.head_dim)
        given = {f"hidden_states_{i}": each.astype(dtype) for i, each in zip((1, 7), states, strict=True)}
        given |= {name: np.ones((1, 3, 8), np.float32) for name in ("rope_cos", "rope_sin")}
        caches = [f"{part}_cache_{i}" for part in ("key", "value") for i in range(2)]
        given |= {name: np.zeros(shape, dtype) for name in caches} | {"kv_write_index": np.array([0])}
        session = onnxruntime.InferenceSession(tmp_path / precision / "draft/context.onnx")
        outputs = ["present_" + name.replace("_cache", "") for name in caches]
        found[precision] = np.stack(session.run(outputs, given))
    assert np.abs(found["fp32"][..., :3, :]).max() > 0.1
    np.testing.assert_allclose(found["fp16"], found["fp32"], atol=2e-2)
