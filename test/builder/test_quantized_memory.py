# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime on a CPU keeps quantised weights in their bits.

The library dequantises one layer at a time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.graph.product import quantized_product
from edgellm_ros.builder.quantization.matrix import QuantizedMatrix

SIZE, LAYERS = 2048, 6
AS_FLOATS = 4 * LAYERS * SIZE**2  # bytes of all weights in fp32
# The memory that a session has taken after a run of one row.
RUN = """
import re, sys
from pathlib import Path
import numpy as np
from edgellm_ros.engine.onnxruntime.session import open_session
import onnxruntime

def memory(key):
    return int(re.search(rf"{key}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

before = memory("VmRSS")
session = open_session(Path(sys.argv[1]), threads=1)
session.run(None, {"x": np.zeros((1, int(sys.argv[2])), np.float32)})
print(memory("VmRSS") - before)
"""


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="the graph runs on the CPU")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["INT4", "INT8"])
def test_a_session_takes_less_memory_than_the_weights_as_floats(tmp_path: Path, kind: str):
    """A session that expands all weights takes at least their bytes as floats.

    That is so whether it expands them in a run or before.
    """
    graph = GraphBuilder("product", "fp32")
    x = graph.input("x", graph.dtype, ["S", SIZE])
    values = np.ones((SIZE, SIZE), np.int8)
    scales = np.full((SIZE // 128, SIZE), 0.01, np.float32)
    for layer in range(LAYERS):
        matrix = QuantizedMatrix(
            fan_in=SIZE,
            fan_out=SIZE,
            dtype=ir.DataType[kind],
            group=128,
            values=lambda: values,
            scales=lambda: scales,
        )
        x = quantized_product(graph, f"layers.{layer}", x, matrix)
    graph.output(x, "y", graph.dtype, ["S", SIZE])
    graph.save(tmp_path / "model.onnx")
    command = [sys.executable, "-c", RUN, tmp_path / "model.onnx", str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < AS_FLOATS
