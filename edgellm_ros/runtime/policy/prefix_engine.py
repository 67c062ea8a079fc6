# SPDX-License-Identifier: Apache-2.0
"""PrefixEngine: computes a policy's context.

Inputs are the rows of camera images, a task and the robot's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from edgellm_ros.diffusion.action_head import PrefixContext
from edgellm_ros.diffusion.policy_config import FlowPolicyConfig
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.binding_names import (
    IMAGE_EMBEDS,
    LAST_ACTION_ROW,
    LAST_PREFIX_ROW,
    TOKEN_IDS,
    present_context,
)
from edgellm_ros.runtime.policy.camera_rows import run_recorded


class PrefixEngine:
    """Runs the prefix, and owns its inputs and outputs but the rows of images.

    The outputs are whatever the prefix engine computes: the action engine has inputs of the same names.
    """

    def __init__(
        self, prefix: EngineExecutor, config: FlowPolicyConfig, device: Device, appended: int = 0
    ) -> None:
        """Make the buffers.

        appended: rows that the action engine writes behind those of each output.
        """
        self._prefix, self._config, self._device = prefix, config, device
        self._appended = appended
        self._tokens = device.empty((config.max_prompt_tokens,), np.int64)
        self._others: dict[str, Tensor] = {}  # buffers of further inputs, by name
        self._outputs = {
            binding.name: device.empty((self._size(binding.shape, appended),), binding.dtype)
            for binding in prefix.bindings.values()
            if not binding.is_input
        }

    def compute(
        self,
        images: Mapping[str, Tensor],
        token_ids: Sequence[int],
        others: Mapping[str, np.ndarray],
        rows: int,
    ) -> PrefixContext:
        """Queue the prefix and return its context.

        images: inputs with the rows of images, which are encoded; others: further inputs by name, of which
        those that the prefix engine does not have are part of the context; rows: how many the prefix has.
        """
        tokens = self._tokens.rows(0, len(token_ids))
        self._device.upload(tokens, np.array(token_ids, np.int64))
        inputs = {
            name: self._uploaded(name, values) for name, values in {**others, **self._last_rows(rows)}.items()
        }
        total = rows + self._appended
        dims = {"I": images[IMAGE_EMBEDS].shape[0], "L": len(token_ids), "S": rows, "C": total}
        outputs = self._views(dims)
        own, passed = (
            {name: tensor for name, tensor in inputs.items() if (name in self._prefix.bindings) == inside}
            for inside in (True, False)
        )
        tensors = {**images, TOKEN_IDS: tokens, **own, **outputs}
        run_recorded(self._prefix, self._device, dims, tensors)
        if self._appended:
            outputs = self._views({**dims, "S": total})
            outputs |= {present_context(name): tensor for name, tensor in outputs.items()}
        return PrefixContext(outputs | passed, dims)

    def _views(self, dims: Mapping[str, int]) -> dict[str, Tensor]:
        """View the outputs by name, with these values of the symbols in their shapes."""
        return {
            name: buffer.view(*(dims[dim] if isinstance(dim, str) else dim for dim in shape))
            for name, buffer in self._outputs.items()
            for shape in [self._prefix.bindings[name].shape]
        }

    def _last_rows(self, rows: int) -> dict[str, np.ndarray]:
        """Return the inputs of prefix and actions that tell the last row they attend to."""
        last = {LAST_PREFIX_ROW: rows - 1} if LAST_PREFIX_ROW in self._prefix.bindings else {}
        if self._appended:
            last[LAST_ACTION_ROW] = rows + self._appended - 1
        return {name: np.array([row], np.int32) for name, row in last.items()}

    def _uploaded(self, name: str, values: np.ndarray) -> Tensor:
        """Upload an input into its buffer, which has room for the longest prefix."""
        if name not in self._others:
            binding = self._prefix.bindings.get(name)
            size = values.size if binding is None else self._size(binding.shape)
            self._others[name] = self._device.empty((size,), values.dtype)
        tensor = self._others[name].view(*values.shape)
        self._device.upload(tensor, values)
        return tensor

    def _size(self, shape: Sequence[int | str], appended: int = 0) -> int:
        rows = self._config.max_prefix_rows + appended
        return prod(rows if isinstance(dim, str) else dim for dim in shape)
