# SPDX-License-Identifier: Apache-2.0
"""The graphs for CUDA of a draft head and of its base.

Both compute what the graphs with a mask compute.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.onnx_bindings import read_bindings
from fixtures.cuda_graphs import compute, variant_inputs
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.exported_graphs import knows_lengths
from fixtures.random_head import base_config, write_random_head

pytestmark = pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the graphs with a mask")
PARENTS = (0, 0, 1, 1, 2, 4)  # of nodes 1 to 6 of a tree
CASES = {
    "fp32": ("llama", "fp32", {}),
    "fp16": ("llama", "fp16", {"fc_norm": True, "norm_output": True, "layers": 2}),
    "fp16, sliding windows": ("mistral", "fp16", {"norm_before_residual": True}),
    "fp32, sliding windows": ("mistral", "fp32", {"input_norm": True}),
    "fp32, norms of heads": ("qwen3", "fp32", {"head_norms": True}),
    "fp16, norms of heads": ("qwen3", "fp16", {"head_norms": True}),
}


@pytest.fixture(scope="module", params=CASES)
def engine(request, tmp_path_factory) -> tuple[str, Path]:
    family, precision, head = CASES[request.param]
    folder = tmp_path_factory.mktemp("draft")
    checkpoint = write_decoder_checkpoint(folder / "checkpoint", family)
    write_random_head(checkpoint / "draft", base_config(checkpoint), **head)
    export(checkpoint, folder / "engine", precision=precision)
    return request.param, folder / "engine"


def tree_mask() -> np.ndarray:
    """Return which nodes of the tree each node attends to: its ancestors and itself."""
    seen = np.eye(len(PARENTS) + 1, dtype=bool)
    for node, parent in enumerate(PARENTS, 1):
        seen[node] |= seen[parent]
    return seen


def graph_inputs(path: Path, batch: int, seen: np.ndarray, start: int) -> dict[str, np.ndarray]:
    """Make random inputs for nodes that attend to each other as `seen` says.

    In sequence i of the batch, the nodes come after `start` + i rows of the cache.
    """
    rng, tokens = np.random.default_rng(0), len(seen)
    dims = {"B": batch, "S": tokens, "N": 2 if tokens > 1 else 1}
    shapes = {b.name: [dims.get(dim, dim) for dim in b.shape] for b in read_bindings(path) if b.is_input}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    angles = rng.standard_normal(shapes["rope_cos"])
    starts = start + np.arange(batch)
    mask = np.zeros(shapes["attention_mask"], bool)
    for row, first in enumerate(starts):
        mask[row, 0, :, :first] = True
        mask[row, 0, :, first : first + tokens] = seen
    return inputs | {
        "rope_cos": np.cos(angles).astype(np.float32),
        "rope_sin": np.sin(angles).astype(np.float32),
        "kv_write_index": starts,
        "attention_mask": mask,
        "last_token_ids": rng.integers(0, tokens, shapes["last_token_ids"]),
    }


@pytest.mark.slow
@knows_lengths
@pytest.mark.parametrize("graph", ["llm/verify.onnx", "draft/model.onnx"])
@pytest.mark.parametrize(
    ("batch", "seen", "start"),
    [(1, tree_mask(), 40), (1, np.tri(9, dtype=bool), 0), (1, np.tri(5, dtype=bool), 3), (4, np.eye(1), 200)],
    ids=["a tree", "a prompt", "accepted tokens", "one token of each of four sequences"],
)
def test_the_cuda_variant_equals_the_graph_with_a_mask(device, engine, graph, batch, seen, start):
    name, folder = engine
    if name == "fp16, norms of heads" and device.memory == "cpu":
        pytest.skip("ONNX Runtime's GroupQueryAttention norms queries and keys on CUDA only: --device cuda")
    inputs = graph_inputs(folder / graph, batch, seen, start)
    expected = compute(folder / graph, CpuDevice(), inputs)
    forms = [".cuda.onnx"]
    if np.array_equal(seen, np.tri(*seen.shape)):  # also as a chain
        forms.append(".chain.cuda.onnx")
    for form in forms:
        variant = (folder / graph).with_suffix(form)
        found = compute(variant, device, variant_inputs(inputs, folder))
        tolerance = 2e-2 if "fp16" in name else 2e-5
        for output, values in expected.items():
            assert np.abs(values).max() > 0.1
            np.testing.assert_allclose(
                found[output], values, atol=tolerance * np.abs(values).max(), err_msg=output
            )


def test_attention_in_half_precision_takes_one_bias_for_all_layers_of_a_window(engine):
    name, folder = engine
    graph = onnx.load(folder / "llm" / "verify.cuda.onnx", load_external_data=False).graph
    fused = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert len(fused) == (3 if "fp16" in name else 0)
    windows = 2 if "norms" in name else 1  # the first layer of Qwen3 has none here
    assert len({node.input[10] for node in fused}) == (windows if fused else 0)
    assert "local_window_size" not in {attribute.name for node in fused for attribute in node.attribute}


def test_a_level_of_a_draft_ends_without_copies(engine):
    """A Reshape before a bound output is a copy, and a Cast a kernel of its own."""
    name, folder = engine
    graph = onnx.load(folder / "draft" / "model.cuda.onnx", load_external_data=False).graph
    makers = {output: node.op_type for node in graph.node for output in node.output}
    assert makers["next_hidden_states"] == "SkipSimplifiedLayerNormalization"
    assert makers["logits"] == "MatMul"
    types = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    half = "fp16" in name
    assert types["logits"] == (onnx.TensorProto.FLOAT16 if half else onnx.TensorProto.FLOAT)
    reshapes = [node for node in graph.node if node.op_type == "Reshape"]
    assert not (half and reshapes)


def test_the_graphs_of_a_folder_share_their_weights(engine):
    _, folder = engine
    for part, own in (("llm", "verify.onnx.data"), ("draft", "model.onnx.data")):
        places = {}
        for path in sorted((folder / part).glob("*.onnx")):
            model = onnx.load(path, load_external_data=False)
            for weight in model.graph.initializer:
                if weight.external_data and not weight.name.startswith("constant"):
                    place = tuple(entry.value for entry in weight.external_data)
                    assert places.setdefault(weight.name, place) == place
        used = {place[0] for place in places.values()}
        assert used == {path.name for path in (folder / part).glob("*.data")} == {own, "model.onnx.data"}
    assert (folder / "llm" / "verify.onnx.data").stat().st_size < 2**17
