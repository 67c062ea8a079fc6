# SPDX-License-Identifier: Apache-2.0
"""Recurrent states are bound as groups of columns that lie side by side."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.lowering.standard.recurrent import cut_columns, join_columns
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine_directory.recurrent_config import RecurrentConfig
from fixtures.layer_graph import DictWeights

HEADS, KEY_DIM = 3, 4


def config(value_dim: int) -> RecurrentConfig:
    return RecurrentConfig("mamba2", 1, HEADS, KEY_DIM, value_dim, conv_dim=8, conv_kernel=4)


@pytest.mark.parametrize(
    ("value_dim", "shape"),
    [(80, (60, 4, 4)), (6, (9, 4, 2)), (5, (15, 4, 1)), (32, (3, 4, 32)), (128, (3, 4, 128))],
)
def test_columns_are_grouped_unless_rows_are_whole_vectors_for_the_gpu(value_dim, shape):
    assert config(value_dim).state_shape == shape
    assert config(value_dim).bytes_per_sequence == (8 * 3 + HEADS * KEY_DIM * value_dim) * 4


@pytest.mark.parametrize("value_dim", [80, 6, 5, 32])
def test_groups_of_columns_follow_each_other_within_a_head(tmp_path, value_dim):
    groups, _, columns = shape = config(value_dim).state_shape
    graph = ModelBuilder("layout", DictWeights({}), "fp32")
    sizes = HEADS, KEY_DIM, value_dim
    bound = graph.input("bound", FLOAT, ["B", *shape])
    whole = graph.input("whole", FLOAT, ["B", *sizes])
    graph.output(graph.op("Identity", join_columns(graph, bound, *sizes)), "joined", FLOAT, ["B", *sizes])
    graph.output(graph.op("Identity", cut_columns(graph, whole, *sizes)), "cut", FLOAT, ["B", *shape])
    graph.save(tmp_path / "model.onnx")
    state = np.random.default_rng(0).standard_normal((2, *sizes)).astype(np.float32)
    per_head = value_dim // columns
    parts = [
        state[:, group // per_head, :, group % per_head * columns :][..., :columns] for group in range(groups)
    ]
    session = open_session(tmp_path / "model.onnx", threads=1)
    joined, cut = session.run(["joined", "cut"], {"bound": np.stack(parts, axis=1), "whole": state})
    np.testing.assert_array_equal(joined, state)
    np.testing.assert_array_equal(cut, np.stack(parts, axis=1))
