# SPDX-License-Identifier: Apache-2.0
"""Parameters of the kernels of recurrent mixers and of feed-forward blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.params import (
    DownParams,
    GateUpParams,
    InProjParams,
    KernelParams,
    MixParams,
    OutProjParams,
    PrepDownParams,
    PrepGateUpParams,
    PrepInProjParams,
    PrepOutProjParams,
)
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights

CHAIN_VALUES = ("conv_inputs", "keys", "values", "decays", "strengths")  # outputs of recurrent layers


def recurrent_block(
    tensors: Mapping[str, Tensor],
    scratch: Mapping[str, int],
    weights: FusedLayerWeights,
    norm: Mapping[str, int],
    *,
    number: int,
    rows: int,
    tokens: int,
) -> dict[str, KernelParams]:
    """Return the parameters of a recurrent mixer's kernels, in order.

    scratch: addresses of the buffers between the kernels; norm: parameters of the kernels that begin a layer;
    number: of the layer's states.
    """
    x, partials = scratch["x"], scratch["in_proj"]
    mixed = {"mixed": scratch["mixed"], "squares": scratch["squares"]}
    chain = dict.fromkeys(CHAIN_VALUES, 0)
    if tokens > 1:
        outputs = {name: tensors.get(f"chain_{name}_{number}") for name in CHAIN_VALUES}
        chain = {name: 0 if each is None else each.pointer for name, each in outputs.items()}
    return {
        "prep_in_proj": PrepInProjParams(**norm, x=x, rows=rows, weights=weights.in_proj),
        "in_proj": InProjParams(**norm, weights=weights.in_proj, partials=partials, x=x, rows=rows),
        "mix": MixParams(
            partials=partials,
            taps=weights.taps,
            conv_bias=weights.conv_bias,
            decay=weights.decay,
            dt_bias=weights.dt_bias,
            skip=weights.skip,
            norm=weights.mixer_norm,
            conv_states=tensors[f"conv_state_{number}"].pointer,
            states=tensors[f"recurrent_state_{number}"].pointer,
            next_conv_states=tensors[f"present_conv_state_{number}"].pointer,
            next_states=tensors[f"present_recurrent_state_{number}"].pointer,
            **mixed,
            **chain,
            tokens=tokens,
        ),
        "prep_out_proj": PrepOutProjParams(**mixed, x=x, weights=weights.out_proj),
        "out_proj": OutProjParams(
            **mixed, weights=weights.out_proj, residual=norm["residual"], ready=x, rows=rows
        ),
    }


def feed_forward(
    scratch: Mapping[str, int], weights: FusedLayerWeights, adapters: Sequence[int], rows: int, tokens: int
) -> dict[str, KernelParams]:
    """Return the parameters of a feed-forward block's kernels, in order.

    adapters: addresses in the table of adapters, of gate_up and down.
    """
    residual, gate_up, x = scratch["residual"], scratch["gate_up"], scratch["x"]
    post_norm = {"norm": weights.post_norm, "residual": residual}
    return {
        "prep_gate_up": PrepGateUpParams(**post_norm, x=x, rows=rows, weights=weights.gate_up),
        "gate_up": GateUpParams(
            **post_norm,
            weights=weights.gate_up,
            partials=gate_up,
            x=x,
            rows=rows,
            adapters=adapters[0],
            tokens=tokens,
        ),
        "prep_down": PrepDownParams(bias=weights.gate_up_bias, partials=gate_up, x=x, weights=weights.down),
        "down": DownParams(
            weights=weights.down,
            bias=weights.down_bias,
            gate_up_bias=weights.gate_up_bias,
            partials=gate_up,
            residual=residual,
            ready=x,
            rows=rows,
            adapters=adapters[1],
            tokens=tokens,
        ),
    }


def numbers_of_states(weights: FusedWeights) -> tuple[int, ...]:
    """Return the number of each layer's KV cache or recurrent state.

    0 of a layer without.
    """
    numbers, count = [], {True: 0, False: 0}
    for layer in weights.layers:
        numbers.append(count[bool(layer.in_proj)])
        count[bool(layer.in_proj)] += bool(layer.qkv or layer.in_proj)
    return tuple(numbers)
