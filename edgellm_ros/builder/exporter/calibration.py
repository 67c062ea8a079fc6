# SPDX-License-Identifier: Apache-2.0
"""Calibrates how a language model's weights are rounded: scales of layers' inputs.

    checkpoint -- CalibrationPlan -- inputs of linear layers while the model runs -- find_scales -- export

The caller runs the model: `add_outputs` makes a graph of its engine that has these inputs as outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from edgellm_ros.builder.calibration.folding import InputGroup, input_groups
from edgellm_ros.builder.calibration.rounding import RoundedLayout, decoder_layers
from edgellm_ros.builder.calibration.search import GroupScales, LayerInputs, search_scales
from edgellm_ros.builder.checkpoint.checkpoint_config import read_section
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.exporter.sources import EXPERT_FOLDER, read_model, rounded_layout
from edgellm_ros.builder.gguf.checkpoint import as_checkpoint, find_gguf
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import graph_path


@dataclass(frozen=True, eq=False)
class CalibrationPlan:
    """A checkpoint whose rounding is calibrated."""

    options: ExportOptions  # of the engine that runs the calibration data
    config: EngineConfig  # of this engine, without files
    weights: Weights
    layout: RoundedLayout
    groups: tuple[InputGroup, ...]
    values: dict[str, str]  # first layer of a group -> name of the inputs in the graph


def plan_calibration(checkpoint: str | Path, options: ExportOptions) -> CalibrationPlan:
    """Read a checkpoint that `export` is to round with these options.

    No weight is read. Raises the errors of `export`.
    """
    checkpoint = Path(checkpoint)
    gguf = find_gguf(checkpoint)
    if gguf is not None:
        with as_checkpoint(gguf, options.mmproj) as folder:
            found = plan_calibration(folder, replace(options, mmproj=None))
        return replace(found, options=replace(found.options, mmproj=options.mmproj))
    # In fp32, as a CPU runs it, and without parts that have no share in an answer.
    plain = ExportOptions(
        max_batch_size=1,
        max_input_len=options.max_input_len,
        max_kv_cache_capacity=options.max_kv_cache_capacity,
        max_lora_rank=0,
        with_draft=False,
    )
    refuse_policy(checkpoint, plan_export(checkpoint, options).config)  # after what `export` refuses
    plan = plan_export(checkpoint, plain)
    _, weights, model = read_model(checkpoint, read_section(checkpoint / "config.json"))
    has_expert = (checkpoint / EXPERT_FOLDER).is_dir()  # an action expert reads the values in the KV cache
    layers = decoder_layers(model.embedding)
    layout = rounded_layout(options, model)
    groups = list(input_groups(weights, layers, model.llm, model.decoder.norm.shift, values=not has_expert))
    scaled = {layer for group in groups for layer in group.layers}
    for name in weights:
        layer = name.removesuffix(".weight")
        if layer not in scaled and layout.group_of(weights.tensors, layer) is not None:
            groups.append(InputGroup((layer,), None))
    llm = plan.graphs[graph_path("llm")]
    assert isinstance(llm, ModelBuilder)
    values = {group.layers[0]: str(llm.linear_inputs[group.layers[0]].name) for group in groups}
    return CalibrationPlan(plain, plan.config, weights, layout, tuple(groups), values)


def refuse_policy(checkpoint: Path, config: EngineConfig) -> None:
    """Raise ValueError for a policy, whose layers have no calibrated scales."""
    if config.policy is not None:
        raise ValueError(f"{checkpoint}: a policy, but --calibrate is for language models")


def find_scales(plan: CalibrationPlan, inputs: Mapping[str, LayerInputs]) -> list[GroupScales]:
    """Choose the scales of all groups; inputs: of the first layer of each group."""
    found = (
        search_scales(plan.weights, plan.layout, group, inputs[group.layers[0]]) for group in plan.groups
    )
    return [scales for scales in found if scales is not None]


def add_outputs(path: Path, names: Iterable[str], target: Path) -> None:
    """Write a graph in fp32 again, beside itself, with some of its values as outputs."""
    model = ir.load(path)
    values = {value.name: value for node in model.graph for value in node.outputs}
    for name in names:
        values[name].type = ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(values[name])
    ir.save(model, target)
