# SPDX-License-Identifier: Apache-2.0
"""`edgellm export --quantize` rounds the layers of the language model.

The command reports what that costs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.calibration.rounding import RoundedLayout, decoder_layers
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.cli import main
from edgellm_ros.cli.quantization.cost import logits
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.quantized_checkpoint import write_quantized_checkpoint

HYBRIDS = (write_nemotron_h_checkpoint, write_qwen3_5_checkpoint)
PROMPTS = ("What do you see?", "go to the red box", "turn left at once and wait")
LARGEST = {"int4": 7, "int8": 127}
TYPES = {"int4": TensorProto.INT4, "int8": TensorProto.INT8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_decoder_checkpoint(tmp_path_factory.mktemp("rounded") / "checkpoint", "llama")


def initialisers(engine: Path) -> dict[str, onnx.TensorProto]:
    return {each.name: each for each in onnx.load(engine / "llm" / "model.onnx").graph.initializer}


@pytest.mark.parametrize("kind", TYPES)
def test_every_weight_is_within_half_a_step_of_the_checkpoints_or_cut_off(checkpoint, tmp_path, kind):
    export(checkpoint, tmp_path / "engine", quantize=kind, group_size=32)
    name, found = "model.layers.0.self_attn.o_proj", initialisers(tmp_path / "engine")
    weight = load_file(checkpoint / "model.safetensors")[f"{name}.weight"].T.astype(np.float32)  # [K,N]
    values = numpy_helper.to_array(found[f"{name}.weight"]).astype(np.float32)
    values = values.reshape(-1, 32, weight.shape[1])
    scales = numpy_helper.to_array(found[f"{name}.scale"]).reshape(-1, 1, weight.shape[1])
    blocks = weight.reshape(values.shape)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    np.testing.assert_allclose(scales, largest / -8 if kind == "int4" else np.abs(largest) / 127, rtol=1e-6)
    steps = np.abs(values - blocks / scales)
    assert (steps <= np.where(blocks / scales > LARGEST[kind], 1.001, 0.501)).all()


@pytest.mark.parametrize("kind", TYPES)
def test_layers_are_rounded_and_embeddings_head_and_norms_are_not(checkpoint, tmp_path, kind):
    export(checkpoint, tmp_path / "engine", quantize=kind)
    found = initialisers(tmp_path / "engine")
    rounded = {name for name, each in found.items() if each.data_type == TYPES[kind]}
    layers = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert rounded == {f"model.layers.{i}.{layer}.weight" for i in range(3) for layer in layers}
    assert found["model.embed_tokens.weight"].data_type == TensorProto.FLOAT  # the tied LM head


@pytest.mark.parametrize("kind", TYPES)
def test_inspect_and_check_show_the_bytes_of_quantised_weights(checkpoint, tmp_path, kind, capsys):
    engine = str(tmp_path / "engine")
    export(checkpoint, engine, quantize=kind)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96  # q, k and v; o; gate, up and down
    size = 3 * layer * {"int4": 0.5, "int8": 1}[kind] / 2**20
    for arguments in (["inspect", engine], ["export", str(checkpoint), "--check", "--quantize", kind]):
        assert main(arguments) == 0
        assert f", {size:.3f} MiB of {kind}\n" in capsys.readouterr().out


def test_a_group_that_does_not_divide_the_inputs_is_halved_until_it_does(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "engine", quantize="int4", group_size=64)
    found = initialisers(tmp_path / "engine")
    assert list(found["model.layers.0.mlp.down_proj.scale"].dims) == [3, 64]  # 96 inputs in groups of 32
    assert list(found["model.layers.0.self_attn.o_proj.scale"].dims) == [1, 64]


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    checkpoint = write_quantized_checkpoint(tmp_path / "checkpoint", "gptq")
    with pytest.raises(ValueError, match="the checkpoint is quantised already"):
        export(checkpoint, tmp_path / "engine", quantize="int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int3"}, "quantize must be one of int4, int8, got 'int3'"),
        ({"quantize": "int4", "group_size": 48}, "group_size must be one of 32, 64, 128, got 48"),
    ],
)
def test_a_wrong_option_is_refused(checkpoint, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / "engine", **options)


def dequantised(checkpoint: Path, copy: Path, kind: str) -> Path:
    """Copy a checkpoint with the weights that the integers of its layers stand for."""
    shutil.copytree(checkpoint, copy)
    weights, tensors = Weights(checkpoint), load_file(checkpoint / "model.safetensors")
    embedding = next(name for name in tensors if "embed" in name)
    weights.quantize(RoundedLayout(kind, 32, decoder_layers(embedding), np.dtype(np.float32)))
    changed = {name for name in tensors if weights.matrix(name.removesuffix(".weight")) is not None}
    assert changed
    tensors |= {name: np.ascontiguousarray(weights.read(name)) for name in changed}
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("write", HYBRIDS)
def test_a_quantised_hybrid_computes_what_its_dequantised_weights_compute(tmp_path, write, kind):
    """The decays of a gated delta net keep their precision; their neighbours do not."""
    checkpoint = write(tmp_path / "checkpoint")
    export(checkpoint, tmp_path / "engine", quantize=kind, group_size=32)
    export(dequantised(checkpoint, tmp_path / "copy", kind), tmp_path / "reference")
    ids = [np.random.default_rng(0).integers(0, 200, 40).tolist()]
    found, expected = (logits(tmp_path / name, ids)[0] for name in ("engine", "reference"))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("kind", TYPES)
def test_a_batch_of_a_quantised_engine_equals_its_requests_alone_up_to_rounding(checkpoint, tmp_path, kind):
    export(checkpoint, tmp_path / "engine", quantize=kind)
    requests = [
        LLMGenerationRequest(prompt, sampling=SamplingParams(max_tokens=8), logprobs=1) for prompt in PROMPTS
    ]
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        alone = [runtime.handle_request(request) for request in requests]
        together = runtime.handle_request(requests)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        found = [[entries[0][1] for entries in answer.logprobs] for answer in (one, other)]
        np.testing.assert_allclose(found[0], found[1], atol=1e-4)


@pytest.mark.slow
def test_the_report_says_what_rounding_cost_in_logits(checkpoint, tmp_path, capsys):
    costs = {}
    for kind in TYPES:
        engine = tmp_path / kind
        arguments = ["export", str(checkpoint), str(engine), "--quantize", kind]
        assert main([*arguments, "--group-size", "32", "--json"]) == 0
        costs[kind] = json.loads(capsys.readouterr().out)["quantization"]
        assert costs[kind]["tokens"] > 4 * 30  # answers of 32 tokens, the last of which has no logits
    assert [path.name for path in tmp_path.iterdir()] == list(TYPES)  # nothing temporary is left
    assert 0.001 < costs["int8"]["relative_error"] < 0.05
    assert 0.02 < costs["int4"]["relative_error"] < 0.5
    assert 0 < costs["int8"]["kl_divergence"] < costs["int4"]["kl_divergence"]
    assert costs["int8"]["same_choice"] > 0.8


def test_a_report_of_an_engine_that_the_cpu_cannot_run_is_refused_before_the_export(
    checkpoint, tmp_path, capsys
):
    arguments = ["export", str(checkpoint), str(tmp_path / "engine"), "--quantize", "int4"]
    assert main([*arguments, "--precision", "bf16"]) == 2
    assert "--no-report skips it" in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()
