# SPDX-License-Identifier: Apache-2.0
"""The vision graph for CUDA computes what the standard graph computes.

The graph is for ONNX Runtime's CUDA provider.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice, Device
from edgellm_ros.engine.executor import EngineExecutor
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.on_device import put

VISION = {
    "layer norms": {},
    "RMSNorms, norms of queries and keys": {"norm_type": "rms_norm", "use_qk_norm": True},
    "no biases, a last norm": {"attention_bias": False, "use_mean_pooling": False},
}
TOLERANCE = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 8e-2}  # of the largest value


def embeds(path, device: Device, pixels: np.ndarray) -> np.ndarray:
    executor = EngineExecutor.open(path, device)
    tiles, rows = len(pixels), len(pixels) * 16
    width = executor.bindings["image_embeds"].shape[1]
    tensors = {
        "pixel_values": put(device, pixels),
        "image_embeds": device.empty((rows, width), executor.bindings["image_embeds"].dtype),
    }
    executor.prepare(0, {"T": tiles, "R": rows}, tensors, device.stream)
    executor.execute(device.stream)
    return device.download(tensors["image_embeds"])


@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize("kind", VISION)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_cuda_variant_equals_the_standard_graph(device, tmp_path, kind, precision):
    if precision != "fp32" and device.memory == "cpu":
        pytest.skip("ONNX Runtime's MultiHeadAttention takes half precision on CUDA only: --device cuda")
    checkpoint = write_internvl_checkpoint(tmp_path / "checkpoint", vision=VISION[kind])
    export(checkpoint, tmp_path / "standard", precision="fp32")
    export(checkpoint, tmp_path / "engine", precision=precision)
    folder = tmp_path / "engine" / "visual"
    variant = onnx.load(folder / "model.cuda.onnx", load_external_data=False)
    assert "MultiHeadAttention" in {node.op_type for node in variant.graph.node}
    pixels = np.random.default_rng(0).standard_normal((3, 64, 108)).astype(np.float32)
    expected = embeds(tmp_path / "standard" / "visual" / "model.onnx", CpuDevice(), pixels)
    found = embeds(folder / "model.cuda.onnx", device, pixels).astype(np.float32)
    np.testing.assert_allclose(found, expected, atol=np.abs(expected).max() * TOLERANCE[precision])
