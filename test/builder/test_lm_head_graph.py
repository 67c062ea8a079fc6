# SPDX-License-Identifier: Apache-2.0
"""The LM head as an input: the bits of a row do not depend on other rows."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import save_file

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.weights.weights import Weights

BATCHES = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 5), (3, 7), (8, 8)]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("hidden", "vocabulary"), [(200, 100), (48, 242), (256, 1), (1024, 302)])
def test_logits_of_a_row_do_not_depend_on_the_batch(tmp_path, hidden, vocabulary, threads):
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((vocabulary, hidden)).astype(np.float32)
    save_file({"lm_head.weight": matrix}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    graph = ModelBuilder("head", weights, "fp32")
    head = LMHead(weights, "lm_head.weight", vocab_size=vocabulary, hidden_size=hidden, as_input=True)
    logits = head.logits(graph, graph.input("x", FLOAT, ["B", "N", hidden]))
    graph.output(logits, "logits", FLOAT, ["B", "N", vocabulary])
    path, _ = graph.save(tmp_path / "head.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rows = rng.standard_normal((64, hidden)).astype(np.float32)
    found = {}
    for batch, wanted in BATCHES:
        x = rows[: batch * wanted].reshape(batch, wanted, hidden)
        (values,) = session.run(None, {"x": x, "lm_head.weight": matrix.T})
        assert values.shape == (batch, wanted, vocabulary)
        found[batch, wanted] = values.reshape(-1, vocabulary)
    whole = found[8, 8]
    np.testing.assert_allclose(whole, rows @ matrix.T, atol=1e-3)
    for values in found.values():
        np.testing.assert_array_equal(values, whole[: len(values)])
