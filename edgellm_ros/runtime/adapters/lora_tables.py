# SPDX-License-Identifier: Apache-2.0
"""LoraTables: the adapters of a batch as the fused kernels read them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.adapters.lora_inputs import LoraInput
from edgellm_ros.runtime.adapters.lora import LoraAdapter

# The linear layers of each product, side by side.
PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
KEPT = 32  # tables of the last batches


class LoraTables:
    """Tables `binding_names.LORA_TABLE` of one engine, by the sequences' adapters.

    - inputs: the engine's LoRA inputs, from which adapters have their tensors
    - max_rank: largest rank that the kernels take

    ValueError if the inputs are not those of products that the kernels compute.
    """

    def __init__(self, device: Device, inputs: Sequence[LoraInput], layers: int, max_rank: int) -> None:
        self._device, self._max_rank = device, max_rank
        by_modules = {tuple(entry.modules): entry for entry in inputs}
        self._inputs: list[list[LoraInput]] = []
        for layer in range(layers):
            blocks = (f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp")
            modules = [
                tuple(f"{blocks[product // 2]}.{name}" for name in names)
                for product, names in enumerate(PRODUCTS)
            ]
            if not all(each in by_modules for each in modules):
                raise ValueError(f"layer {layer} has other LoRA inputs")
            self._inputs.append([by_modules[each] for each in modules])
        if len(by_modules) != len(PRODUCTS) * layers:
            raise ValueError("not only the decoder's products have LoRA inputs")
        self._kept: OrderedDict[tuple[LoraAdapter, ...], Tensor] = OrderedDict()

    def takes(self, adapters: Sequence[LoraAdapter]) -> bool:
        """Tell whether the kernels take adapters of these ranks."""
        return all(adapter.rank <= self._max_rank for adapter in adapters)

    def table(self, adapters: Sequence[LoraAdapter]) -> Tensor:
        """Return the table of sequences with these adapters.

        Equal adapters give the same memory.
        """
        key = tuple(adapters)
        if key not in self._kept:
            rows = [[[self._entry(each, a) for a in key] for each in layer] for layer in self._inputs]
            self._kept[key] = on_device(self._device, np.array(rows, np.int64))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the tables of a removed adapter."""
        for key in [key for key in self._kept if adapter in key]:
            del self._kept[key]

    def _entry(self, entry: LoraInput, adapter: LoraAdapter) -> tuple[int, int, int]:
        if entry.a_name not in adapter.changed:
            return 0, 0, 0
        return adapter.tensors[entry.a_name].pointer, adapter.tensors[entry.b_name].pointer, adapter.rank
