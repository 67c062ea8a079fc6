# SPDX-License-Identifier: Apache-2.0
"""Action experts of hybrids name the attention layers whose caches they read."""

from __future__ import annotations

import json

import onnx
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.hybrid_checkpoints import add_action_expert, write_nemotron_h_checkpoint

PATTERN = "M*-M*M*"  # attention in layers 1, 4 and 6


@pytest.fixture
def checkpoint(tmp_path):
    return write_nemotron_h_checkpoint(tmp_path / "checkpoint", hybrid_override_pattern=PATTERN)


def caches_read(engine) -> set[str]:
    graph = onnx.load(engine / "action/model.onnx", load_external_data=False).graph
    return {value.name for value in graph.input if "_cache_" in value.name}


def test_named_layers_become_the_caches_of_these_layers(checkpoint, tmp_path):
    add_action_expert(checkpoint, [6, 1, 6], layers=3)
    config = export(checkpoint, tmp_path / "engine")
    assert config.action.kv_caches == (2, 0, 2)
    expected = {"key_cache_0", "value_cache_0", "key_cache_2", "value_cache_2"}
    assert caches_read(tmp_path / "engine") == expected


def test_without_names_all_attention_layers_are_read_in_order(checkpoint, tmp_path):
    add_action_expert(checkpoint, None, layers=3)
    assert export(checkpoint, tmp_path / "engine").action.kv_caches == (0, 1, 2)


@pytest.mark.parametrize(
    ("kv_layers", "layers", "message"),
    [
        ([1, 3], 2, r"kv_layers\[1\] 3: .* is of type recurrent and has no KV cache; .* are 1, 4, 6"),
        ([2, 1], 2, r"kv_layers\[0\] 2: .* is of type mlp and has no KV cache"),
        ([1, 7], 2, r"kv_layers\[1\] 7: expected a layer from 0 to 6"),
        ([-1], 1, r"kv_layers\[0\] -1: expected a layer from 0 to 6"),
        ([1], 2, "num_hidden_layers 2: kv_layers has 1"),
        (None, 7, "num_hidden_layers 7: the language model.* has 3 attention layers; kv_layers names"),
        (["1"], 1, r"kv_layers\[0\]: expected int, got str '1'"),
    ],
)
def test_layers_without_a_cache_are_refused(checkpoint, tmp_path, kv_layers, layers, message):
    add_action_expert(checkpoint, kv_layers, layers)
    with pytest.raises(ValueError, match=rf"action_expert/config\.json.*{message}"):
        export(checkpoint, tmp_path / "engine")


def test_an_engine_whose_action_head_reads_a_cache_that_it_has_not_is_refused(checkpoint, tmp_path):
    add_action_expert(checkpoint, [6, 1], layers=2)
    export(checkpoint, tmp_path / "engine")
    path = tmp_path / "engine/config.json"
    data = json.loads(path.read_text())
    data["action"]["kv_caches"] = [0, 3]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"kv_caches \[0, 3\]: the language model has 3 KV caches"):
        EngineConfig.load(tmp_path / "engine")
