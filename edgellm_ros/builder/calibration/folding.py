# SPDX-License-Identifier: Apache-2.0
"""Scales of a linear layer's inputs, moved into the weights before and after.

    y = W x = (W diag(s)) (x / s)

The division costs nothing where x is the result of a norm, whose weight is divided by s, or of a linear
layer, whose outputs are divided: what is between that layer and x must be linear in each channel.

    | layers                       | scale is divided out of                                   |
    |------------------------------|-----------------------------------------------------------|
    | q, k, v; inputs of recurrent | the norm before attention or recurrent layer              |
    | gate, up                     | the norm before the feed-forward block                    |
    | down                         | up: x = silu(gate) up; relu(up)^2 takes the root of s     |
    | o                            | v: query heads that share a value head share its scales   |

Layers behind the norm of a recurrent layer (out_proj) keep their inputs, as does o_proj where an action
expert reads the values in the KV cache. Sources: llm-awq, awq/quantize/auto_scale.py; AutoAWQ,
awq/quantize/scale.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig

# Modules of one layer. Norm -> the linear layers that read its result:
BEHIND_NORMS = {
    "input_layernorm": (
        *(f"self_attn.{name}_proj" for name in "qkv"),
        *(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
    ),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "norm": (*(f"mixer.{name}_proj" for name in "qkv"), "mixer.in_proj", "mixer.up_proj"),
}
# Linear layer -> the one before it, by whose outputs its inputs are multiplied.
BEHIND_UP = {"mlp.down_proj": "mlp.up_proj", "mixer.down_proj": "mixer.up_proj"}
BEHIND_VALUES = {"self_attn.o_proj": "self_attn.v_proj", "mixer.o_proj": "mixer.v_proj"}
SQUARED = "mixer.down_proj"  # its inputs are relu(up)^2


@dataclass(frozen=True)
class InputGroup:
    """Linear layers that read the same inputs, and the module before them.

    `source` is the module, if it can divide these inputs.

    - shift: the module is a norm that multiplies by shift + weight; None = a linear layer
    - power: inputs grow with this power of the module's results
    - heads: value heads, query heads for each, size of a head; None = each result is one input
    """

    layers: tuple[str, ...]
    source: str | None
    shift: float | None = None
    power: float = 1.0
    heads: tuple[int, int, int] | None = None

    def share(self, magnitudes: np.ndarray) -> np.ndarray:
        """Average numbers of inputs [K] over the inputs that must have one scale, [K]."""
        if self.heads is None:
            return magnitudes
        grouped = magnitudes.reshape(self.heads)
        return np.broadcast_to(grouped.mean(1, keepdims=True), self.heads).reshape(-1)

    def source_factors(self, scales: np.ndarray) -> np.ndarray:
        """Compute factors [N] of the results of `source` for scales of the inputs [K]."""
        if self.heads is not None:
            scales = scales.reshape(self.heads)[:, 0].reshape(-1)
        return (1 / scales.astype(np.float64) ** (1 / self.power)).astype(np.float32)

    def fold(self, weights: Weights, scales: np.ndarray) -> None:
        """Divide the inputs of the layers by scales [K], which `share` leaves as they are."""
        if self.source is None:
            return
        for layer in self.layers:
            weights.multiply(f"{layer}.weight", scales[None])
        factors = self.source_factors(scales)
        if self.shift is not None:
            weights.multiply(f"{self.source}.weight", factors, self.shift)
            return
        weights.multiply(f"{self.source}.weight", factors[:, None])
        if f"{self.source}.bias" in weights:
            weights.multiply(f"{self.source}.bias", factors)


def input_groups(
    weights: Weights, layers: str, llm: LanguageModelConfig, shift: float, values: bool
) -> Iterator[InputGroup]:
    """Yield the groups of a decoder, in the order of its layers.

    layers: module of the decoder's layers; shift: of the norms in them; values: whether scales may change the
    values in the KV cache, which only o_proj may read then.
    """
    heads = llm.num_key_value_heads, llm.num_attention_heads // llm.num_key_value_heads, llm.head_dim
    for i in range(weights.list_length(layers)):

        def full(name: str, layer: str = f"{layers}.{i}") -> str:
            return f"{layer}.{name}"

        def there(name: str, layer: str = f"{layers}.{i}") -> bool:
            return f"{layer}.{name}.weight" in weights

        for norm, readers in BEHIND_NORMS.items():
            if there(norm) and any(map(there, readers)):
                yield InputGroup(tuple(full(each) for each in readers if there(each)), full(norm), shift)
        for layer, source in BEHIND_UP.items():
            if there(layer) and there(source):
                yield InputGroup((full(layer),), full(source), power=2.0 if layer == SQUARED else 1.0)
        for layer, source in BEHIND_VALUES.items():
            if values and there(layer) and there(source):
                yield InputGroup((full(layer),), full(source), heads=heads)
