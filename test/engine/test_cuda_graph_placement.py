# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime runs every node of an engine on the GPU.

Nothing is copied to the host or back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import onnx
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.onnxruntime import session as onnxruntime_session
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.act_checkpoint import write_act
from fixtures.diffusion_checkpoint import write_diffusion
from fixtures.groot_checkpoint import write_groot_of_lerobot
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.pi_checkpoint import write_pi
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.xvla_checkpoint import write_xvla

pytestmark = pytest.mark.only_on("cuda", reason="looks at graphs as ONNX Runtime's CUDA provider runs them")
COPIES = ("MemcpyToHost", "MemcpyFromHost")


@pytest.fixture
def placed(monkeypatch, tmp_path, device):
    """Function that opens a directory's engines; returns the graphs that sessions run."""
    make_options, numbers = onnxruntime_session._session_options, count()

    def with_file(*arguments):
        options = make_options(*arguments)
        options.optimized_model_filepath = str(tmp_path / f"{next(numbers)}.onnx")
        return options

    def open_all(engine) -> list[onnx.GraphProto]:
        monkeypatch.setattr(onnxruntime_session, "_session_options", with_file)
        LLMInferenceRuntime(engine, device).close()
        files = sorted(tmp_path.glob("*.onnx"))
        return [onnx.load(file, load_external_data=False).graph for file in files]

    return open_all


def assert_no_copies(graphs) -> None:
    assert len(graphs) == 4  # language model, vision, audio, action
    for graph in graphs:
        inputs = [value.name for value in graph.input]
        copies = [f"{node.op_type} of {node.input[0]}" for node in graph.node if node.op_type in COPIES]
        assert copies == [], f"the engine with inputs {inputs}"


@pytest.mark.parametrize("name", ["arena_engine", "tiny_engine", "tiny_lora_engine"])
def test_no_engine_copies_to_the_host_or_back(placed, request, name):
    assert_no_copies(placed(request.getfixturevalue(name)))


def test_no_engine_in_half_precision_with_all_extras_copies_either(placed, tiny_checkpoint, tmp_path_factory):
    engine = tmp_path_factory.mktemp("extras")
    extras = {"max_lora_rank": 4, "hidden_state_layers": (1, 3), "lm_head_input": True}
    export(tiny_checkpoint, engine, precision="fp16", **extras)
    assert_no_copies(placed(engine))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "write", [write_act, write_diffusion, write_pi, write_smolvla, write_groot_of_lerobot, write_xvla]
)
def test_no_engine_of_a_policy_copies_to_the_host_or_back(placed, tmp_path, write, precision):
    export(write(tmp_path / "checkpoint"), tmp_path / "engine", precision=precision)
    graphs = placed(tmp_path / "engine")
    copies = [f"{node.op_type} of {node.input[0]}" for graph in graphs for node in graph.node]
    assert [each for each in copies if each.startswith(COPIES)] == []


def decode_nodes(nodes) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a step of one token: of each If, those of the first branch."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.name == "then_branch":
                yield from decode_nodes(attribute.g.node)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("write", [write_nemotron_h_checkpoint, write_qwen3_5_checkpoint])
def test_a_decode_step_of_a_hybrid_does_not_copy_to_the_host_or_back(placed, tmp_path, write, precision):
    export(write(tmp_path / "checkpoint"), tmp_path / "engine", precision=precision)
    (graph,) = placed(tmp_path / "engine")
    nodes = list(decode_nodes(graph.node))
    assert "LinearAttention" in {node.op_type for node in nodes}
    assert [f"{node.op_type} of {node.input[0]}" for node in nodes if node.op_type in COPIES] == []
