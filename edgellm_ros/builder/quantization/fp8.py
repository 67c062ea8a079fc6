# SPDX-License-Identifier: Apache-2.0
"""FP8 weights: those of NVIDIA's Model Optimizer, DeepSeek's and Qwen's own.

Model Optimizer stores one scale for each weight (`weight_scale`), the method `fp8` of transformers one for
each block (`weight_scale_inv`, which is no inverse: the weight is multiplied by it). Scales of activations
are not used: activations stay in the precision of the engine.

Sources: Model-Optimizer, modelopt/torch/export/quant_utils.py; transformers, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.quantization.matrix import QuantizedMatrix
from edgellm_ros.builder.quantization.scaled import Block, scaled_matrix
from edgellm_ros.builder.quantization.tensors import Stored


class ModelOptLayout:
    """Reads the layers of a checkpoint with quant_algo `FP8`."""

    def __init__(self, config: ConfigSection) -> None:
        config.one_of("quant_algo", ["FP8"])

    def matrix(self, tensors: Stored, module: str) -> QuantizedMatrix | None:
        """Return the weight of a layer; None if it is not quantised."""
        return scaled_matrix(tensors, module, "weight_scale")


class BlockFp8Layout:
    """Reads the layers of a checkpoint with quant_method `fp8`."""

    def __init__(self, config: ConfigSection) -> None:
        config.one_of("fmt", ["e4m3"], default="e4m3")
        self._block: Block | None = None
        if config.has("weight_block_size"):
            self._block = read_block(config, "weight_block_size")

    def matrix(self, tensors: Stored, module: str) -> QuantizedMatrix | None:
        """Return the weight of a layer; None if it is not quantised."""
        return scaled_matrix(tensors, module, "weight_scale_inv", self._block)


def read_block(config: ConfigSection, key: str) -> Block:
    """Read the outputs and inputs of a block."""
    sizes = config.integers(key)
    if len(sizes) != 2 or min(sizes) < 1:
        raise config.fail(key, "expected two sizes, of outputs and inputs")
    return sizes[0], sizes[1]
