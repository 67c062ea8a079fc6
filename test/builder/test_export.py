# SPDX-License-Identifier: Apache-2.0
"""The engine directory that `export` writes for a valid checkpoint."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor
from edgellm_ros.builder.families.qwen3_vl import config as qwen3_vl_config
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint

PARTS = ("llm", "visual", "audio", "action")
LIMITS = {"max_batch_size": 2, "max_input_len": 48, "max_kv_cache_capacity": 64}


def run(engine, part, **inputs):
    return open_session(engine / part / "model.onnx").run(None, inputs)


def vision_inputs(patches=24):
    rng = np.random.default_rng(0)
    angle = rng.standard_normal((patches, 8)).astype(np.float32)
    return {
        "pixel_values": rng.standard_normal((patches, 3 * 8 * 8)).astype(np.float32),
        "rope_cos": np.cos(angle),
        "rope_sin": np.sin(angle),
        "pos_embed_index": rng.integers(0, 36, (4, patches)),
        "pos_embed_weight": np.full((4, patches), 0.25, np.float32),
    }


def test_the_directory_has_the_files_that_its_config_lists(tiny_checkpoint, tmp_path):
    written = export(tiny_checkpoint, tmp_path, **LIMITS)
    assert EngineConfig.load(tmp_path, verify=True) == written
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    graphs = {f"{part}/model.onnx{end}" for part in PARTS for end in ("", ".data")}
    others = {"tokenizer.json", "chat_template.jinja", "special_tokens_map.json"}
    others |= {"embedding.safetensors", "llm/model.cpu.onnx", "llm/model.cuda.onnx", "action/model.cuda.onnx"}
    assert {entry.path for entry in written.files} == graphs | others
    assert found == graphs | others | {"config.json"}


def test_config_repeats_the_checkpoint_and_the_limits(tiny_checkpoint, tmp_path):
    config = export(tiny_checkpoint, tmp_path, **LIMITS)
    thinker = json.loads((tiny_checkpoint / "config.json").read_text())
    assert config.llm.num_deepstack_features == len(thinker["vision_config"]["deepstack_visual_indexes"])
    assert config.llm.rope.mrope_section == tuple(thinker["text_config"]["rope_parameters"]["mrope_section"])
    assert config.special_tokens.image_token_id == thinker["image_token_id"]
    assert config.action.future_start_token_id in config.stop_token_ids
    assert (config.builder.max_batch_size, config.builder.max_kv_cache_capacity) == (2, 64)


@pytest.mark.slow
def test_options_add_files_and_a_later_export_without_them_removes_these(tiny_checkpoint, tmp_path):
    path = tmp_path / "map.safetensors"
    save_file({"vocab_map": np.arange(269, -1, -1)}, path)
    options = {"hidden_state_layers": (2,), "lm_head_input": True, "vocab_map": path}
    config = export(tiny_checkpoint, tmp_path / "engine", **LIMITS, **options)
    assert EngineConfig.load(tmp_path / "engine", verify=True) == config
    graph = onnx.load(tmp_path / "engine" / "llm" / "model.onnx", load_external_data=False).graph
    onnx.checker.check_model(tmp_path / "engine" / "llm" / "model.onnx", full_check=True)
    assert "lm_head.weight" in {value.name for value in graph.input}
    assert "hidden_states_2" in {value.name for value in graph.output}
    assert config.llm.output_vocab_size == 270
    assert load_file(tmp_path / "engine" / "vocab_map.safetensors")["vocab_map"].tolist() == [*range(270)]
    assert load_file(tmp_path / "engine" / "lm_head.safetensors")["lm_head.weight"].shape == (48, 270)

    plain = export(tiny_checkpoint, tmp_path / "engine", **LIMITS)
    assert not {"vocab_map.safetensors", "lm_head.safetensors"} & {
        path.name for path in (tmp_path / "engine").iterdir()
    }
    assert plain == export(tiny_checkpoint, tmp_path / "other", **LIMITS)


@pytest.mark.slow
def test_exporting_twice_gives_the_same_bytes(tiny_checkpoint, tmp_path):
    first = export(tiny_checkpoint, tmp_path / "a", **LIMITS)
    assert export(tiny_checkpoint, tmp_path / "b", **LIMITS) == first


def test_shards_and_a_single_file_give_the_same_engine(tmp_path):
    whole = write_tiny_checkpoint(tmp_path / "whole", shards=1)
    parts = write_tiny_checkpoint(tmp_path / "parts", shards=3)
    assert export(whole, tmp_path / "a").files == export(parts, tmp_path / "b").files


def test_graphs_are_valid_onnx(tiny_checkpoint, tmp_path):
    export(tiny_checkpoint, tmp_path, **LIMITS)
    for part in PARTS:
        onnx.checker.check_model(tmp_path / part / "model.onnx", full_check=True)


def test_embedding_table_is_the_checkpoints(tiny_checkpoint, tmp_path):
    export(tiny_checkpoint, tmp_path, **LIMITS)
    shards = [load_file(path) for path in tiny_checkpoint.glob("*.safetensors")]
    (expected,) = [
        tensors["model.embed_tokens.weight"] for tensors in shards if "model.embed_tokens.weight" in tensors
    ]
    table = load_file(tmp_path / "embedding.safetensors")["embedding"]
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, expected)


def test_checkpoint_without_an_action_expert(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", action_expert=False)
    config = export(checkpoint, tmp_path / "engine", **LIMITS)
    assert config.action is None
    assert not (tmp_path / "engine" / "action").exists()


def test_checkpoint_with_a_config_but_no_weights_of_an_audio_encoder(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", audio_weights=False)
    config = export(checkpoint, tmp_path / "engine", **LIMITS)
    assert config.audio is None
    assert not (tmp_path / "engine" / "audio").exists()


@pytest.mark.slow
def test_tied_embeddings_serve_as_the_last_layer(tiny_checkpoint, tmp_path):
    """A tied checkpoint has no lm_head: the embedding table is the LM head."""
    tied = write_tiny_checkpoint(tmp_path / "tied", shards=1)
    untied = write_tiny_checkpoint(tmp_path / "untied", shards=1)
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, untied / "model.safetensors")
    config = json.loads((tied / "config.json").read_text())
    write_json(tied / "config.json", config | {"tie_word_embeddings": True})
    export(tied, tmp_path / "a", **LIMITS)
    export(untied, tmp_path / "b", **LIMITS)
    initialisers = [
        {
            item.name: onnx.numpy_helper.to_array(item, str(tmp_path / name / "llm"))
            for item in graph.initializer
        }
        for name in "ab"
        for graph in [onnx.load(tmp_path / name / "llm" / "model.onnx", load_external_data=False).graph]
    ]
    np.testing.assert_array_equal(
        initialisers[0]["model.embed_tokens.weight"], initialisers[1]["lm_head.weight"]
    )


def test_a_tied_checkpoint_with_a_matrix_of_its_own_uses_that_matrix(tmp_path):
    """test/parity/test_parity_checkpoints.py compares with transformers 5."""
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", shards=1)
    config = json.loads((checkpoint / "config.json").read_text())
    write_json(checkpoint / "config.json", config | {"tie_word_embeddings": True})
    export(checkpoint, tmp_path / "tied", **LIMITS)
    write_json(checkpoint / "config.json", config | {"tie_word_embeddings": False})
    export(checkpoint, tmp_path / "untied", **LIMITS)
    for name in ("model.onnx", "model.onnx.data", "model.cpu.onnx", "model.cuda.onnx"):
        found, expected = (tmp_path / folder / "llm" / name for folder in ("tied", "untied"))
        assert found.read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_layers_that_are_all_dense_need_no_num_experts_0(tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    for dense in ({"mlp_only_layers": [2, 1, 0]}, {"decoder_sparse_step": 4}):
        text = config["text_config"] | {"num_experts": 8} | dense
        write_json(checkpoint / "config.json", config | {"text_config": text})
        written = export(checkpoint, tmp_path / "engine", **LIMITS)
        assert written.files == export(tiny_checkpoint, tmp_path / "plain", **LIMITS).files


@pytest.mark.slow
def test_min_pixels_and_max_pixels_take_precedence_over_size(tiny_checkpoint, tmp_path):
    """test/parity/test_parity_checkpoints.py compares with transformers."""
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    path = checkpoint / "preprocessor_config.json"
    processor = json.loads(path.read_text())
    size = {"shortest_edge": 1024, "longest_edge": 2048}
    for limits, expected in (
        ({"min_pixels": 4096, "max_pixels": 8192}, (4096, 8192)),
        ({"max_pixels": 8192}, (1024, 8192)),
        ({"min_pixels": None, "max_pixels": None}, (1024, 2048)),
    ):
        write_json(path, processor | {"size": size} | limits)
        vision = export(checkpoint, tmp_path / "engine", **LIMITS).vision
        assert (vision.min_pixels, vision.max_pixels) == expected


@pytest.mark.parametrize("pairs", [8, 64, 128])
def test_without_mrope_section_the_frequencies_are_those_of_the_model_code(pairs):
    """The axis of each frequency pair, by the model code's loop with [24, 20, 20]."""
    section = qwen3_vl_config._fitting_section(qwen3_vl_config.MROPE_SECTION, pairs)
    axes, expected = np.zeros(pairs, int), np.zeros(pairs, int)
    for axis in (1, 2):
        expected[axis : 20 * 3 : 3] = axis
        axes[axis : section[axis] * 3 : 3] = axis
    assert sum(section) == pairs
    np.testing.assert_array_equal(axes, expected)


@pytest.mark.slow
def test_fp16_engine_is_close_to_fp32(tiny_checkpoint, tmp_path):
    export(tiny_checkpoint, tmp_path / "fp32", **LIMITS)
    config = export(tiny_checkpoint, tmp_path / "fp16", precision="fp16", **LIMITS)
    assert config.precision == "fp16"
    full, half = (run(tmp_path / name, "visual", **vision_inputs()) for name in ("fp32", "fp16"))
    for expected, found in zip(full, half, strict=True):
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, expected, atol=2e-2)


def test_bf16_engine_is_written_for_gpus(tiny_checkpoint, tmp_path):
    export(tiny_checkpoint, tmp_path, precision="bf16", **LIMITS)
    graph = onnx.load(tmp_path / "llm" / "model.onnx", load_external_data=False).graph
    types = {value.name: value.type.tensor_type.elem_type for value in [*graph.input, *graph.output]}
    assert types["inputs_embeds"] == types["key_cache_0"] == onnx.TensorProto.BFLOAT16
    assert types["logits"] == types["rope_cos"] == onnx.TensorProto.FLOAT


def test_plans_and_parts_of_an_earlier_export_are_removed(tiny_checkpoint, tmp_path):
    engine = tmp_path / "engine"
    export(tiny_checkpoint, engine, **LIMITS)
    for ending in ("", ".json", ".sm_90.kernels"):
        (engine / "llm" / f"sm_90-trt10.15.plan{ending}").write_bytes(b"stale")
    without_expert = write_tiny_checkpoint(tmp_path / "checkpoint", action_expert=False)
    export(without_expert, engine, **LIMITS)
    assert not list(engine.rglob("*.plan*"))
    assert not list(engine.glob("action/*"))


def test_an_interrupted_export_leaves_no_loadable_engine(tiny_checkpoint, tmp_path, monkeypatch):
    """The weights of the action expert disappear after the checks."""
    engine = tmp_path / "engine"
    export(tiny_checkpoint, engine, **LIMITS)
    read = StoredTensor.read

    def interrupted(tensor, *rows):
        if tensor.file.parent.name == "action_expert":
            raise OSError("the disk was removed")
        return read(tensor, *rows)

    monkeypatch.setattr(StoredTensor, "read", interrupted)
    with pytest.raises(OSError, match="the disk was removed"):
        export(tiny_checkpoint, engine, **LIMITS)
    with pytest.raises(FileNotFoundError, match="not an engine directory"):
        EngineConfig.load(engine)


def test_layers_of_hidden_states_may_be_any_sequence(tiny_checkpoint, tmp_path):
    export(tiny_checkpoint, tmp_path, hidden_state_layers=range(1, 3))
    assert EngineConfig.load(tmp_path).hidden_state_layers == (1, 2)
