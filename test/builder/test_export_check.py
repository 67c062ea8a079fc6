# SPDX-License-Identifier: Apache-2.0
"""`check` tells the result of an export before it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import namedtuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import ExportOptions, check, export, inspect, render_check
from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor
from edgellm_ros.builder.exporter import artefacts
from edgellm_ros.builder.lowering.onnxruntime.decoder import build_onnxruntime_llm
from fixtures.sparse_checkpoint import write_sparse_checkpoint
from fixtures.tiny_adapter import write_adapter
from fixtures.tiny_checkpoint import write_json

LIMITS = {"max_batch_size": 2, "max_input_len": 48, "max_kv_cache_capacity": 64}


def sizes(engine):
    """Sizes of all files of an engine directory except its `config.json`."""
    files = {path.relative_to(engine).as_posix(): path for path in engine.rglob("*") if path.is_file()}
    return {name: path.stat().st_size for name, path in sorted(files.items()) if name != "config.json"}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_files_and_memory_are_those_of_the_export(tiny_checkpoint, tmp_path, precision):
    report = check(tiny_checkpoint, ExportOptions(precision=precision, **LIMITS))
    config = export(tiny_checkpoint, tmp_path / "engine", precision=precision, **LIMITS)
    assert report.files == sizes(tmp_path / "engine")
    assert report.bytes == sum(entry.size for entry in config.files)
    assert report.config == dataclasses.replace(config, files=())
    exported = inspect(tmp_path / "engine")
    assert (report.memory, report.parts) == (exported.memory, exported.parts)


@pytest.mark.slow
def test_options_and_adapters_are_in_the_report(tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    write_adapter(checkpoint / "lora" / "polite", checkpoint, r=4)
    path = tmp_path / "map.safetensors"
    save_file({"vocab_map": np.arange(270)}, path)
    options = {"hidden_state_layers": (2,), "lm_head_input": True, "vocab_map": path, **LIMITS}
    report = check(checkpoint, ExportOptions(**options))
    export(checkpoint, tmp_path / "engine", **options)
    assert report.files == sizes(tmp_path / "engine")
    exported = inspect(tmp_path / "engine")
    assert report.config.builder.max_lora_rank == 4
    assert (report.memory, report.adapters) == (exported.memory, exported.adapters)


def test_no_weight_is_read_and_no_file_is_written(tiny_checkpoint, tmp_path, monkeypatch):
    def read(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(StoredTensor, "read", read)
    report = check(tiny_checkpoint, engine_dir=tmp_path / "engine")
    assert report.family == "qwen3_omni"
    assert not list(tmp_path.iterdir())


def test_parameters_are_the_values_of_all_tensors(tiny_checkpoint):
    files = [*tiny_checkpoint.glob("*.safetensors"), *tiny_checkpoint.glob("action_expert/*.safetensors")]
    assert check(tiny_checkpoint).parameters == sum(
        tensor.size for path in files for tensor in load_file(path).values()
    )


def test_what_the_export_refuses_is_refused(tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (checkpoint / "chat_template.jinja").unlink()
    with pytest.raises(FileNotFoundError, match="chat_template"):
        check(checkpoint)
    with pytest.raises(ValueError, match="exceeds the model's max_position_embeddings 1024"):
        check(tiny_checkpoint, ExportOptions(max_kv_cache_capacity=4096))


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_told(tiny_checkpoint, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    needed = check(tiny_checkpoint).bytes
    for free, short in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(10**9, 0, free))
        report = check(tiny_checkpoint, engine_dir=tmp_path / "new" / "engine")
        assert (report.disk.needed, report.disk.free, report.disk.short) == (needed, free, short)
        assert ("TOO SMALL" in render_check(report)) is short


def test_files_that_the_export_replaces_need_no_space(tiny_checkpoint, tmp_path):
    export(tiny_checkpoint, tmp_path, **LIMITS)
    assert check(tiny_checkpoint, ExportOptions(**LIMITS), tmp_path).disk.needed == 0


def test_an_engine_directory_that_cannot_be_made_is_refused(tiny_checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file: expected a directory"):
        check(tiny_checkpoint, engine_dir=tmp_path / "file" / "engine")


def test_report_is_readable_and_serialisable(tiny_checkpoint):
    report = check(tiny_checkpoint)
    text = render_check(report)
    for expected in ("qwen3_omni", "3 layers of 48", "KV cache of a sequence", "llm/model.onnx.data", "free"):
        assert expected in text
    assert json.loads(json.dumps(dataclasses.asdict(report)))["files"] == report.files


def test_a_variant_needs_the_weights_of_its_graph(tiny_checkpoint, monkeypatch):
    """The check of the variant comes before anything is written."""

    def with_one_more(*arguments):
        graph = build_onnxruntime_llm(*arguments)
        graph.weight("model.more.weight", (2,), lambda: np.zeros(2))
        return graph

    monkeypatch.setattr(artefacts, "build_onnxruntime_llm", with_one_more)
    with pytest.raises(ValueError, match=r"llm has no weight 'model\.more\.weight'"):
        check(tiny_checkpoint)


def test_a_model_of_the_size_of_the_largest_takes_no_weights(tmp_path):
    """Only the headers are on the disk.

    The file of 15 GB is sparse: its tensors have no bytes there.
    """
    config = {
        "model_type": "qwen3_omni_moe_thinker",
        "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 0,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 1,
            "rope_theta": 1e6,
        },
    }
    write_json(tmp_path / "config.json", config)
    write_sparse_checkpoint(tmp_path, config["text_config"])
    report = check(
        tmp_path,
        ExportOptions(precision="fp16", max_batch_size=1, max_input_len=4000, max_kv_cache_capacity=8192),
    )
    assert report.parameters == 8_190_735_360  # as its model card tells
    assert report.memory.kv_cache_per_token == 147456
