# SPDX-License-Identifier: Apache-2.0
"""Exports of GGUF files: configuration, blocks in graphs, what is refused."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.gguf.checkpoint import LINK, as_checkpoint, linked_tensors
from edgellm_ros.builder.gguf.config import llama3_factors
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.gguf_files import ARCHITECTURES, QUANTISED, vocabulary, write_gguf
from fixtures.requests_for_tests import request

LIMITS = {"max_input_len": 64, "max_kv_cache_capacity": 128}
ONE = request("in the other thing", max_tokens=12, logprobs=20)


def dequantised(path, folder):
    """Write the checkpoint in Hugging Face format whose floats a GGUF file stands for."""
    with as_checkpoint(path) as made:
        shutil.copytree(made, folder)
        tensors = {name: tensor.read() for name, tensor in linked_tensors(made).items()}
    (folder / LINK).unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(each) for name, each in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def answer(engine, device):
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0) as runtime:
        return runtime.handle_request(ONE)


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_in_the_graph_give_the_answers_of_their_floats(tmp_path, device, kind):
    path = write_gguf(tmp_path / "model.gguf", "llama", kind)
    export(path, tmp_path / "blocks", **LIMITS)
    export(dequantised(path, tmp_path / "floats"), tmp_path / "plain", **LIMITS)
    found, expected = answer(tmp_path / "blocks", device), answer(tmp_path / "plain", device)
    assert found.token_ids == expected.token_ids
    for mine, other in zip(found.logprobs, expected.logprobs, strict=True):
        known = dict(other)
        for token, value in mine:
            assert value == pytest.approx(known.get(token, value), abs=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_floats_stay_as_they_are(tmp_path, architecture):
    path = write_gguf(tmp_path / "model.gguf", architecture, "F16")
    export(path, tmp_path / "engine", precision="fp16", **LIMITS)
    graph = onnx.load(tmp_path / "engine/llm/model.onnx", load_external_data=False).graph
    assert not {"DequantizeLinear", "MatMulNBits"} & {node.op_type for node in graph.node}


def test_the_weights_of_layers_take_the_bits_of_the_file(tmp_path):
    export(write_gguf(tmp_path / "model.gguf", "qwen3", "Q4_0"), tmp_path / "engine", **LIMITS)
    graph = onnx.load(tmp_path / "engine/llm/model.onnx", load_external_data=False).graph
    sizes = {each.name: each.data_type for each in graph.initializer}
    int4 = [name for name, kind in sizes.items() if kind == onnx.TensorProto.INT4]
    assert len(int4) == 2 * 4  # of each layer: qkv, o, gate and up, down


def test_stop_tokens_are_the_file_s_and_the_known_ends(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    config = export(path, tmp_path / "engine", **LIMITS)
    ids = {token: i for i, token in enumerate(vocabulary())}
    assert set(config.stop_token_ids) == {ids["<|im_end|>"], ids["<|endoftext|>"]}


def test_a_folder_with_one_file_is_that_file(tmp_path):
    write_gguf(tmp_path / "folder/model.gguf")
    assert export(tmp_path / "folder", tmp_path / "engine", **LIMITS).llm.num_hidden_layers == 2
    write_gguf(tmp_path / "folder/other.gguf")
    with pytest.raises(ValueError, match=r"several GGUF files: model\.gguf, other\.gguf"):
        export(tmp_path / "folder", tmp_path / "engine", **LIMITS)


def test_the_factors_of_llama_3_become_its_scaling(tmp_path):
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    factors = llama3_factors(64, 50000.0, scaling).astype(np.float32)
    path = write_gguf(tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors})
    with as_checkpoint(path) as folder:
        found = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert found == pytest.approx(scaling)
    path = write_gguf(tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors * 1.1})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight.*no factors of Llama 3"):
        export(path, tmp_path / "engine")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture 'gemma3': supported: llama, qwen2, qwen3"),
        ({"general.architecture": "clip"}, "general.architecture 'clip': a vision tower: give its language"),
        ({"llama.block_count": None}, "key 'llama.block_count' is missing"),
        ({"llama.block_count": 10**9}, "num_hidden_layers 1000000000: the last layer in model.gguf is"),
        ({"llama.block_count": 0}, "llama.block_count 0: expected an integer from 1"),
        (
            {"llama.embedding_length": 999},
            "model.gguf/config.json: hidden_size 999: model.gguf has no",
        ),
        ({"llama.expert_count": 8}, "llama.expert_count 8: mixtures of experts are not supported"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count 32: expected 64"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn': supported: none, linear"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: 'bert', supported: gpt2"),
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre: 'klingon', supported: command-r"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type: 1 entries for 272 tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges: 'ab': expected two tokens"),
        ({"tokenizer.ggml.merges": ["a \u00e4\u00f6"]}, "tokenizer.ggml.merges: "),
        ({"tokenizer.ggml.eos_token_id": 999}, "tokenizer.ggml.eos_token_id: 999: expected a token below"),
        ({"tokenizer.chat_template": None}, "tokenizer.chat_template is None, expected the model's"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(tmp_path, keys, message):
    path = write_gguf(tmp_path / "model.gguf", **keys)
    with pytest.raises(ValueError, match=message) as error:
        export(path, tmp_path / "engine", **LIMITS)
    assert "\n" not in str(error.value)


def test_scales_that_are_not_finite_are_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama", "Q8_0")
    place = next(each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(place.data_offset)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' has scales that are not"):
        export(path, tmp_path / "engine", **LIMITS)
