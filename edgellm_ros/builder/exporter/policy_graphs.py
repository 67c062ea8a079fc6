# SPDX-License-Identifier: Apache-2.0
"""The graphs of a policy, with its large layers in 8 bits if the options say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from edgellm_ros.builder.calibration.rounding import RoundedLayout
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.exporter.artefacts import CPU, CUDA, artefact_path, file_name
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.graph.graph import DTYPES, GraphBuilder
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.passes.block_products import IN_FP32, multiply_blocks
from edgellm_ros.builder.passes.int8_products import multiply_in_int8
from edgellm_ros.builder.passes.pools import pool_by_maxima
from edgellm_ros.builder.passes.table_rows import read_rows_in_8_bits
from edgellm_ros.builder.policies import LargeLayers, PolicyModel


def policy_graphs(
    model: PolicyModel, section: ConfigSection, options: ExportOptions
) -> dict[str, GraphBuilder]:
    """Build the graphs: path -> graph, after the graph whose weights it shares.

    No weight is read. A part has another graph for ONNX Runtime's CUDA provider if the policy or a pass makes
    one; with `quantize` that one multiplies with the weights as they are. With `cpu_int8` there is one for a
    CPU. section: `config.json`. ValueError for options that round a policy without large layers.
    """
    layers = _rounded_layers(model, section, options)
    forms: dict[str, list[Callable[[ModelBuilder], bool]]] = {  # the passes of each form
        CUDA: [lambda graph: pool_by_maxima(graph.graph)]
    }
    if layers is not None and options.quantize is not None:
        dtype = np.dtype(DTYPES[options.precision].numpy())
        layers.weights.quantize(RoundedLayout(options.quantize, options.group_size, layers.modules, dtype))
        forms[CUDA] += [partial(multiply_blocks, level=IN_FP32), read_rows_in_8_bits]
    if layers is not None and options.cpu_int8:
        forms[CPU] = [partial(multiply_in_int8, modules=layers.modules), read_rows_in_8_bits]
    found: dict[str, GraphBuilder] = {}
    own = layers is not None
    for part, build in model.parts.items():
        standard = found[artefact_path(part)] = build(options.precision)
        for form, passes in forms.items():
            make = model.cuda_parts.get(part, build) if form == CUDA else build
            graph = make(options.precision)
            adapted = [adapt(graph) for adapt in passes]
            if make is not build or any(adapted):
                graph.share_weights(standard, file_name(part), own=own)
                found[artefact_path(part, form)] = graph
    for name, make in model.cuda_only.items():
        part, graph = name.split("/")[0], make(options.precision)
        for adapt in forms[CUDA]:
            adapt(graph)
        graph.share_weights(found[artefact_path(part)], file_name(part), own=own)
        found[artefact_path(name, CUDA)] = graph
    return found


def _rounded_layers(model: PolicyModel, section: ConfigSection, options: ExportOptions) -> LargeLayers | None:
    """Return the layers that options round; None for none.

    ValueError for a policy that has no such layers.
    """
    names = [name for name in ("quantize", "cpu_int8") if getattr(options, name)]
    if names and model.layers is None:
        raise section.fail(
            "type", f"convolutions are most of the work of this policy, and {names[0]} rounds linear layers"
        )
    return model.layers if names else None
