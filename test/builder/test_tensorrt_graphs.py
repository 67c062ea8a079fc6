# SPDX-License-Identifier: Apache-2.0
"""Graphs of all exports have only what TensorRT's parser takes; needs no TensorRT.

`make test-tensorrt` builds plans of such graphs with NVIDIA's own builder.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import save_file

from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import ExportPlan, plan_export
from edgellm_ros.builder.families import families, qwen3_omni, registered
from edgellm_ros.builder.policies import policies
from edgellm_ros.builder.tensorrt.profiles import make_profiles
from edgellm_ros.engine_directory.choices import PRECISIONS, ROUNDINGS
from edgellm_ros.engine_directory.config import LanguageModelConfig
from edgellm_ros.engine_directory.files import DRAFT, VERIFY, graph_path
from edgellm_ros.engine_directory.parts import ACTION
from fixtures.draws import draws
from fixtures.export_checkpoints import CHECKPOINTS
from fixtures.quantized_checkpoint import METHODS
from fixtures.seed_oss_family import SEED_OSS
from fixtures.tensorrt_rules.operators import unsupported

pytestmark = pytest.mark.only_on("cpu", reason="the export is the same for every device")
POLICIES = {"smolvla", "pi0", "pi05", "groot", "groot n16", "act", "diffusion", "xvla"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function that writes a checkpoint once, by name."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = CHECKPOINTS[name](tmp_path_factory.mktemp("checkpoint") / "checkpoint")
        return made[name]

    return find


def planned(checkpoint: Path, **options) -> ExportPlan:
    with registered(SEED_OSS):
        return plan_export(checkpoint, ExportOptions(**options))


def broken_rules(plan: ExportPlan) -> list[str]:
    """Return what breaks a rule in the graphs that `edgellm build` compiles."""
    paths = [graph_path(part) for part in make_profiles(plan.config)]
    return [f"{path}: {problem}" for path in paths for problem in unsupported(plan.graphs[path].graph)]


class Facts(NamedTuple):
    """What tests ask of an export with default options."""

    family: str
    llm: LanguageModelConfig
    parts: frozenset[str]  # that `edgellm build` makes plans of
    broken: list[str]


@pytest.fixture(scope="module")
def facts(checkpoint):
    """A function that plans the export of a checkpoint once, by name."""

    @functools.cache
    def find(name: str) -> Facts:
        plan = planned(checkpoint(name))
        parts = frozenset(make_profiles(plan.config))
        return Facts(plan.family, plan.config.llm, parts, broken_rules(plan))

    return find


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_graphs_of_a_checkpoint_are_within_the_rules(facts, name):
    assert facts(name).broken == []


@pytest.mark.parametrize("precision", sorted({*PRECISIONS} - {ExportOptions().precision}))
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_graphs_of_a_checkpoint_in_other_precisions_are_within_the_rules(checkpoint, name, precision):
    assert broken_rules(planned(checkpoint(name), precision=precision)) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", draws(("fp16",), PRECISIONS))
@pytest.mark.parametrize("name", sorted(CHECKPOINTS.keys() - POLICIES))
def test_graphs_with_all_optional_inputs_and_outputs_are_within_the_rules(
    checkpoint, facts, tmp_path, name, precision
):
    llm, kept = facts(name).llm, tmp_path / "map.safetensors"
    save_file({"vocab_map": np.arange(llm.vocab_size)[::-1].copy()}, kept)
    layers = tuple(sorted({1, llm.num_hidden_layers}))
    options = {"max_lora_rank": 8, "hidden_state_layers": layers, "lm_head_input": True, "vocab_map": kept}
    assert broken_rules(planned(checkpoint(name), precision=precision, **options)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("name", sorted(CHECKPOINTS.keys() - POLICIES - METHODS.keys()))
def test_graphs_with_rounded_weights_are_within_the_rules(checkpoint, name, kind):
    assert broken_rules(planned(checkpoint(name), precision="fp16", quantize=kind, group_size=32)) == []


@pytest.mark.parametrize("name", sorted(POLICIES - {"act", "diffusion"}))
def test_graphs_of_policies_with_rounded_weights_are_within_the_rules(checkpoint, name):
    assert broken_rules(planned(checkpoint(name), precision="bf16", quantize="int8", group_size=32)) == []


@pytest.mark.slow
def test_every_family_every_policy_and_every_part_is_checked(facts):
    plans = [facts(name) for name in CHECKPOINTS]
    known = {each.name for each in (*families(), SEED_OSS)}
    known |= {name for each in policies() for name in (each.name, *each.more)}
    assert {plan.family for plan in plans} == known
    parts = {part for plan in plans for part in plan.parts}
    assert parts == {"llm", "visual", "audio", "prefix", ACTION, VERIFY, DRAFT}


def test_a_node_outside_the_list_is_found_in_a_family_s_graph(checkpoint, monkeypatch):
    def with_another_node(*arguments, **keywords):
        graph = build_audio(*arguments, **keywords)
        graph.op("NonZero", graph.graph.inputs[0])
        return graph

    build_audio = qwen3_omni.build_audio
    monkeypatch.setattr(qwen3_omni, "build_audio", with_another_node)
    (problem,) = broken_rules(planned(checkpoint("tiny")))
    assert problem.startswith("audio/model.onnx: NonZero '/NonZero': not an operator of the parser's list")


def test_the_files_of_an_export_are_within_the_rules(tiny_lora_engine):
    paths = sorted(tiny_lora_engine.glob("*/model.onnx"))
    assert [path.parent.name for path in paths] == ["action", "audio", "llm", "visual"]
    assert {path.parent.name: list(unsupported(ir.load(path).graph)) for path in paths} == {
        path.parent.name: [] for path in paths
    }


def test_the_graph_for_onnx_runtime_on_cuda_uses_other_operators_too(tiny_engine):
    assert list(unsupported(ir.load(tiny_engine / "llm" / "model.cuda.onnx").graph))
