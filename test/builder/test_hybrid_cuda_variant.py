# SPDX-License-Identifier: Apache-2.0
"""The graphs of hybrids for CUDA compute what the standard graphs compute.

The graphs are for ONNX Runtime's CUDA provider.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice, Device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.adapters.lora_inputs import rank_sizes
from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS
from fixtures.exported_graphs import knows_lengths
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.on_device import put

WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
CAPACITY, POSITIONS = 160, 200
HOST = CpuDevice()
OPTIONS = {"max_kv_cache_capacity": CAPACITY, "max_input_len": 150}
RUNS = [  # sequences, tokens of each, valid tokens, rows in the cache before
    pytest.param(1, 1, [1], 0, id="a first token"),
    pytest.param(3, 1, [1, 1, 1], 20, id="a decode step of a batch"),
    pytest.param(1, 2, [2], 7, id="two tokens"),
    pytest.param(1, 64, [64], 0, id="a chunk"),
    pytest.param(1, 130, [130], 9, id="chunks and a part of one"),
    pytest.param(1, 70, [65], 0, id="padding in a second chunk"),
    pytest.param(1, 6, [1], 3, id="padding longer than the convolution"),
]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A function of family, seed and options of `export`.

    The function returns an engine directory, which is made once.
    """
    made: dict[str, Path] = {}

    def make(family: str, seed: int, changes=None, **options) -> Path:
        key = json.dumps([family, seed, changes, options])
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            checkpoint = WRITERS[family](folder / "checkpoint", seed, **(changes or {}))
            export(checkpoint, folder / "engine", **OPTIONS, **options)
            made[key] = folder / "engine"
        return made[key]

    return make


@functools.lru_cache(16)
def opened(path: Path, device: Device) -> EngineExecutor:
    """Open a graph, or return it where one of the latest tests has opened it."""
    return EngineExecutor.open(path, device, threads=1)


def make_inputs(engine: Path, batch: int, tokens: int, valid: list[int], start: int, rank: int = 0, seed=0):
    """Return random inputs of both graphs, by name.

    Among them are caches, states, and adapters of this rank.
    """
    rng = np.random.default_rng(seed)
    mask_graph = opened(engine / "llm" / "model.onnx", HOST)
    starts = start + np.arange(batch)
    seen = starts[:, None] + np.arange(tokens)
    sizes = {"B": batch, "S": tokens, "N": 1, **rank_sizes(rank)}
    inputs = {}
    for name, binding in mask_graph.bindings.items():
        shape = [sizes.get(size, size) for size in binding.shape]
        if binding.is_input and binding.dtype.kind == "f":
            scale = 0.1 if "lora_" in name else 1.0
            inputs[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    if "rope_cos" in inputs:
        angle = rng.uniform(0, 6, inputs["rope_cos"].shape)
        inputs["rope_cos"], inputs["rope_sin"] = np.cos(angle), np.sin(angle)
    inputs |= {
        "kv_write_index": starts,
        "attention_mask": (np.arange(CAPACITY) <= seen[:, :, None])[:, None],
        "last_token_ids": np.array(valid)[:, None] - 1,
        "valid_tokens": np.array(valid),
    }
    return inputs


def as_variant(inputs, engine: Path):
    """Return the inputs of the standard graph as those of the variant."""
    batch, tokens, _ = inputs["inputs_embeds"].shape
    others = {name: array for name, array in inputs.items() if name != "attention_mask"}
    if "rope_cos" in inputs:
        others["position_ids"] = 3 + np.arange(batch * tokens).reshape(batch, tokens)
        for name in ("rope_cos", "rope_sin"):
            others[name] = np.zeros((POSITIONS, inputs[name].shape[2]), np.float32)
            others[name][others["position_ids"]] = inputs[name]
    others["kv_length"] = inputs["kv_write_index"] + tokens
    others["embedding"] = load_file(engine / "embedding.safetensors")["embedding"]
    return others


def run(path: Path, device, inputs):
    """Run a graph once; return its outputs.

    Caches are updated in place, states are not.
    """
    executor = opened(path, device)
    batch, tokens, _ = inputs["inputs_embeds"].shape
    dims = {"B": batch, "S": tokens, "N": 1, "P": POSITIONS, "T": min(tokens, CHAIN_TOKENS)}
    tensors = {}
    for name, binding in executor.bindings.items():
        if binding.is_input:
            tensors[name] = put(device, inputs[name].astype(binding.dtype))
            dims |= {
                symbol: size
                for symbol, size in zip(binding.shape, inputs[name].shape, strict=True)
                if isinstance(symbol, str)
            }
    for name, binding in executor.bindings.items():
        cache = name.replace("present_key_", "key_cache_").replace("present_value_", "value_cache_")
        if not binding.is_input:
            shape = tuple(dims.get(size, size) for size in binding.shape)
            tensors[name] = tensors[cache] if cache != name else device.empty(shape, binding.dtype)
    executor.prepare(0, dims, tensors, device.stream)
    executor.execute(device.stream)
    return {name: device.download(tensors[name]) for name, b in executor.bindings.items() if not b.is_input}


def assert_equal(engine: Path, device, inputs, tolerance: float, graph: str = "model") -> None:
    valid, start = inputs["valid_tokens"], inputs["kv_write_index"]
    expected = run(engine / "llm" / f"{graph}.onnx", HOST, inputs)
    found = run(engine / "llm" / f"{graph}.cuda.onnx", device, as_variant(inputs, engine))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        for row, count in enumerate(valid):  # what padding computes is not read
            one, other = found[name][row].astype(np.float32), values[row].astype(np.float32)
            if name.startswith(("present_key", "present_value")):
                one, other = (x[:, : start[row] + count] for x in (one, other))
            if name.startswith(("hidden_states", "chain_", "fused")):
                one, other = one[:count], other[:count]
            scale = max(1.0, np.abs(other).max())
            np.testing.assert_allclose(one, other, atol=tolerance * scale, err_msg=name)


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize(("batch", "tokens", "valid", "start"), RUNS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", WRITERS)
def test_the_variant_equals_the_standard_graph(device, exports, family, seed, batch, tokens, valid, start):
    engine = exports(family, seed)
    assert_equal(engine, device, make_inputs(engine, batch, tokens, valid, start), 2e-4)


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 1), (1, 5)])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        pytest.param("nemotron_h", {"time_step_min": 0.0, "ssm_state_size": 64}, id="no lower bound of dt"),
        pytest.param("nemotron_h", {"mamba_head_dim": 32, "ssm_state_size": 128}, id="whole rows, mamba2"),
        pytest.param("nemotron_h", {"mamba_head_dim": 80, "ssm_state_size": 128}, id="Nemotron Nano's heads"),
        pytest.param("qwen3_5", {"linear_key_head_dim": 64, "linear_value_head_dim": 24}, id="groups, delta"),
    ],
)
def test_the_variant_equals_the_standard_graph_for_states_of_other_sizes(
    device, exports, family, sizes, batch, tokens
):
    engine = exports(family, 2, sizes)
    assert_equal(engine, device, make_inputs(engine, batch, tokens, [tokens] * batch, 3), 2e-4)


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("family", WRITERS)
def test_the_variant_has_adapters_and_hidden_states(device, exports, family, tokens):
    engine = exports(family, 3, max_lora_rank=4, hidden_state_layers=[1, 2])
    inputs = make_inputs(engine, 1, tokens, [tokens], 4, rank=3)
    assert any("lora_A" in name for name in inputs)
    assert_equal(engine, device, inputs, 2e-4)


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize(("batch", "tokens"), [(1, 5), (2, 1)])
@pytest.mark.parametrize("family", WRITERS)
def test_the_variant_equals_the_standard_graph_in_half_precision(device, exports, family, batch, tokens):
    if family == "qwen3_5" and device.memory == "cpu":
        pytest.skip("ONNX Runtime's GroupQueryAttention norms queries and keys on CUDA only: --device cuda")
    engine = exports(family, 0, precision="fp16")
    assert_equal(engine, device, make_inputs(engine, batch, tokens, [tokens] * batch, 4), 2e-2)


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize("family", WRITERS)
def test_prompts_of_several_sequences_run_together_in_half_precision(device, exports, family):
    if family == "qwen3_5" and device.memory == "cpu":
        pytest.skip("ONNX Runtime's GroupQueryAttention norms queries and keys on CUDA only: --device cuda")
    engine = exports(family, 0, precision="fp16")
    inputs = make_inputs(engine, 3, 6, [6, 2, 4], 0)
    inputs["kv_write_index"] = np.zeros(3, np.int64)
    inputs["attention_mask"] = np.tile(np.arange(CAPACITY) <= np.arange(6)[:, None], (3, 1, 1, 1))
    assert_equal(engine, device, inputs, 2e-2)


WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}  # as Qwen3.5 has it


@pytest.mark.only_on("cuda", reason="GatedDeltaNet has CUDA kernels only")
@pytest.mark.parametrize("tokens, valid", [(2, 2), (64, 64), (130, 120)])
def test_prompts_of_published_sizes_equal_the_standard_graph(device, exports, tokens, valid):
    engine = exports("qwen3_5", 0, WIDE, precision="fp16")
    assert_equal(engine, device, make_inputs(engine, 1, tokens, [valid], 5), 0.02)


@pytest.mark.parametrize(
    "changes, options, count",
    [
        pytest.param(WIDE, {"precision": "fp16"}, 1, id="half precision"),
        pytest.param(WIDE, {"precision": "bf16"}, 1, id="bfloat16"),
        pytest.param(WIDE, {"precision": "fp32"}, 0, id="fp32"),
        pytest.param({"linear_key_head_dim": 64}, {"precision": "fp16"}, 0, id="another size"),
    ],
)
def test_prompts_are_scanned_in_chunks_where_there_are_kernels(exports, changes, options, count):
    engine = exports("qwen3_5", 0, changes, **options)
    layers = json.loads((engine / "config.json").read_text())["llm"]["recurrent"]["num_layers"]
    for graph, each in (("model.cuda.onnx", count), ("verify.cuda.onnx", 0)):
        found = Counter[str]()

        def visit(nodes, found=found) -> None:
            for node in nodes:
                found[node.op_type] += 1
                for attribute in node.attribute:
                    visit(attribute.g.node)

        visit(onnx.load(engine / "llm" / graph, load_external_data=False).graph.node)
        assert found["GatedDeltaNet"] == each * layers
        assert found["LinearAttention"] == (2 - each) * layers


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize(("tokens", "valid"), [(2, 2), (5, 5), (8, 8), (30, 30), (6, 3)])
@pytest.mark.parametrize("family", WRITERS)
def test_both_graphs_of_a_verification_output_the_same_chain(device, exports, family, tokens, valid):
    engine = exports(family, 0)
    assert_equal(engine, device, make_inputs(engine, 1, tokens, [valid], 9), 2e-4, "verify")


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("family", WRITERS)
def test_the_graph_of_verifications_has_the_other_outputs_of_the_model(exports, family, tokens):
    llm = exports(family, 0) / "llm"
    inputs = make_inputs(llm.parent, 2, tokens, [tokens, (tokens + 1) // 2], 9)
    found, expected = (run(llm / name, HOST, inputs) for name in ("verify.onnx", "model.onnx"))
    assert any(name.startswith("chain_") for name in found)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


# Inputs that ONNX Runtime's CUDA kernels read on the host: operator -> positions.
HOST_INPUTS = {
    "If": {0}, "Reshape": {1}, "Slice": {1, 2, 3}, "Split": {1}, "Unsqueeze": {1}, "Squeeze": {1},
    "Expand": {1}, "CumSum": {1}, "GroupQueryAttention": {6},
}  # fmt: skip


def copies_of(model: onnx.ModelProto, branch: str = "then_branch") -> list[str]:
    """Return the nodes of a run that would copy between host and GPU.

    The rules are those of ONNX Runtime. What follows from shapes and constants alone is computed on the host.
    A Concat copies sizes and addresses, and so does a Split of unequal parts, unless they are up to four
    along the last axis. A constant that the GPU reads lies there, so a node of a branch that reads it on the
    host copies it. branch: of each If; a decode step takes the first one, a run of several tokens the second
    one.
    """
    constants = {w.name: w for w in model.graph.initializer}
    host, copies = set(), []
    read_on_gpu, read_by_branches = set(), []

    def visit(nodes, in_branch=False) -> None:
        for node in nodes:
            reads = set(filter(None, node.input))
            follows = reads & host and reads <= host | constants.keys()
            if node.op_type == "Shape" or (follows and node.op_type != "If"):
                host.update(node.output)
                continue
            allowed = HOST_INPUTS.get(node.op_type, set())
            if any(name in host and place not in allowed for place, name in enumerate(node.input)):
                copies.append(node.name)
            for place, name in enumerate(node.input):
                if name in constants and place not in allowed:
                    read_on_gpu.add(name)
                elif name in constants and in_branch:
                    read_by_branches.append((name, node.name))
            if node.op_type == "Split":
                sizes = onnx.numpy_helper.to_array(constants[node.input[1]])
                axis = next(a.i for a in node.attribute if a.name == "axis")
                in_one_kernel = len(set(sizes.tolist())) == 1 or (len(sizes) <= 4 and axis == -1)
                copies.extend([node.name] * (not in_one_kernel))
            if node.op_type == "Concat":
                copies.append(node.name)
            if node.op_type == "If":
                visit(next(a.g.node for a in node.attribute if a.name == branch), in_branch=True)

    visit(model.graph.node)
    return copies + [node for name, node in read_by_branches if name in read_on_gpu]


@pytest.mark.parametrize("family", WRITERS)
def test_no_node_of_a_decode_step_in_half_precision_copies_to_the_host_or_back(exports, family):
    llm = exports(family, 0, precision="fp16") / "llm"
    assert copies_of(onnx.load(llm / "model.onnx", load_external_data=False)) != []
    assert copies_of(onnx.load(llm / "model.cuda.onnx", load_external_data=False)) == []


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("branch", ["then_branch", "else_branch"])
def test_no_node_of_a_verification_or_a_step_with_drafting_copies_to_the_host_or_back(
    exports, family, branch
):
    llm = exports(family, 0, precision="fp16") / "llm"
    assert copies_of(onnx.load(llm / "verify.cuda.onnx", load_external_data=False), branch) == []


@pytest.mark.parametrize("family", WRITERS)
def test_a_decode_step_has_one_kernel_for_the_convolution_and_one_for_the_state(exports, family):
    engine = exports(family, 0, precision="fp16")
    graph = onnx.load(engine / "llm" / "model.cuda.onnx", load_external_data=False).graph
    choices = [
        {a.name: Counter(node.op_type for node in a.g.node) for a in node.attribute}
        for node in graph.node
        if node.op_type == "If"
    ]
    layers = [choice for choice in choices if choice["then_branch"]["LinearAttention"]]
    counts = Counter(value.name.rstrip("0123456789") for value in graph.input)
    assert len(layers) == counts["recurrent_state_"] == len(choices) - 1
    for choice in layers:
        assert choice["then_branch"]["CausalConvWithState"] == choice["then_branch"]["LinearAttention"] == 1
        assert not {"MatMul", "Concat"} & choice["then_branch"].keys()
        several = choice["else_branch"]
        assert several["CausalConvWithState"] == several["LinearAttention"] == 1
        assert "MatMul" not in several
    attention = Counter(node.op_type for node in graph.node)
    assert attention["GroupQueryAttention"] == counts["key_cache_"]


def test_a_decode_step_of_a_mamba2_layer_has_seventeen_kernels(exports):
    """They are its norm, two products, and what is between them.

    Sigmoid and a Mul become one kernel, QuickGelu.
    """
    engine = exports("nemotron_h", 0, {"hybrid_override_pattern": "M*-", "use_bias": False}, precision="fp16")
    graph = onnx.load(engine / "llm" / "model.cuda.onnx", load_external_data=False).graph
    constants = {weight.name for weight in graph.initializer}
    found: Counter[str] = Counter()

    def visit(nodes) -> None:
        for node in nodes:
            if node.op_type == "If":
                visit(next(a.g.node for a in node.attribute if a.name == "then_branch"))
            elif set(node.input) <= constants:  # computed when the graph is loaded
                constants.update(node.output)
            elif node.name.startswith("/layers.0/") and node.op_type not in ("Reshape", "Concat"):
                found[node.op_type] += 1

    visit(graph.node)
    assert found == {
        "RMSNormalization": 2, "MatMul": 2, "Cast": 2, "Split": 2,
        "CausalConvWithState": 1, "LinearAttentionGate": 1, "Max": 1, "Mul": 4, "LinearAttention": 1,
        "HyperConnectionPostMix": 1,
        "Sigmoid": 1,
    }  # fmt: skip


def test_no_result_of_a_branch_is_a_view_that_onnx_runtime_would_copy(exports):
    engine = exports("nemotron_h", 0, precision="fp16")
    graph = onnx.load(engine / "llm" / "model.cuda.onnx", load_external_data=False).graph
    branches = [a.g for node in graph.node if node.op_type == "If" for a in node.attribute]
    steps = [branch for branch in branches if any(node.op_type == "LinearAttention" for node in branch.node)]
    for branch in steps[::2]:  # of one token
        results = {value.name for value in branch.output}
        views = [node for node in branch.node if node.op_type == "Reshape"]
        assert [view.name for view in views if results & set(view.output)] == []


def test_both_graphs_of_a_hybrid_share_one_file_of_weights(exports):
    places = []
    for name in ("model.onnx", "model.cuda.onnx"):
        model = onnx.load(exports("qwen3_5", 0) / "llm" / name, load_external_data=False)
        weights = {w.name: [(e.key, e.value) for e in w.external_data] for w in model.graph.initializer}
        places.append({name: place for name, place in weights.items() if place})
    original, variant = places
    assert variant.items() <= original.items()
    assert {dict(place)["location"] for place in variant.values()} == {"model.onnx.data"}
    own = {name for name in original.keys() - variant.keys() if not name.startswith("constant_")}
    assert own <= {"lm_head.weight", "model.embed_tokens.weight"}  # an input if it is the embedding table


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("nemotron_h", {"head_dim": 12}),
        ("nemotron_h", {"ssm_state_size": 120, "mamba_head_dim": 112}),
        ("qwen3_5", {"linear_key_head_dim": 1032, "linear_value_head_dim": 8}),
    ],
)
def test_a_hybrid_whose_heads_the_kernels_do_not_take_has_no_graph_for_cuda(tmp_path, family, sizes):
    checkpoint = WRITERS[family](tmp_path / "checkpoint", **sizes)
    export(checkpoint, tmp_path / "engine")
    assert (tmp_path / "engine/llm/model.onnx").is_file()
    assert not (tmp_path / "engine/llm/model.cuda.onnx").exists()
