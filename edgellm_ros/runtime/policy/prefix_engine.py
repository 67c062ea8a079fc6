# SPDX-License-Identifier: Apache-2.0
"""PrefixEngine: computes a policy's context.

Inputs are camera images, a task and the robot's state.
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
from edgellm_ros.engine_directory.binding_names import IMAGE_EMBEDS, PIXEL_VALUES, TOKEN_IDS
from edgellm_ros.multimodal.padded_image import padded_image

CHANNELS = 3


class PrefixEngine:
    """Runs the vision tower and the prefix, and owns their inputs and outputs.

    The outputs are whatever the prefix engine computes: the action engine has inputs of the same names.
    """

    def __init__(
        self, visual: EngineExecutor, prefix: EngineExecutor, config: FlowPolicyConfig, device: Device
    ) -> None:
        self._visual, self._prefix = visual, prefix
        self._config, self._device = config, device
        cameras, size = config.cameras, config.cameras.image_size
        count = len(cameras.names)
        self._pixels = device.empty((count, CHANNELS, size, size), np.float32)
        width = prefix.bindings[IMAGE_EMBEDS].shape[1]
        self._image_rows = device.empty((count * cameras.tokens, int(width)), visual.dtype(IMAGE_EMBEDS))
        self._tokens = device.empty((config.max_prompt_tokens,), np.int64)
        self._others: dict[str, Tensor] = {}  # further inputs, by name
        self._outputs = {
            binding.name: device.empty((self._size(binding.shape),), binding.dtype)
            for binding in prefix.bindings.values()
            if not binding.is_input
        }

    def encode(self, images: Sequence[np.ndarray]) -> None:
        """Queue the vision tower for the images of a request, all in one run."""
        count, cameras = len(images), self._config.cameras
        pixels = self._pixels.rows(0, count)
        padding = cameras.image_size, cameras.fill, cameras.centred, cameras.filtered
        self._device.upload(pixels, np.stack([padded_image(image, *padding) for image in images]))
        rows = self._image_rows.rows(0, count * cameras.tokens)
        tensors = {PIXEL_VALUES: pixels, IMAGE_EMBEDS: rows}
        self._run(self._visual, {"N": count, "R": rows.shape[0]}, tensors)

    def compute(
        self, images: int, token_ids: Sequence[int], others: Mapping[str, np.ndarray], rows: int
    ) -> PrefixContext:
        """Queue the prefix of the images that were encoded last; return its context.

        others: inputs by name. Those that the prefix engine does not have are part of the context. rows: how
        many rows the context has.
        """
        tokens = self._tokens.rows(0, len(token_ids))
        self._device.upload(tokens, np.array(token_ids, np.int64))
        for name, values in others.items():
            if name not in self._others:
                self._others[name] = self._device.empty(values.shape, values.dtype)
            self._device.upload(self._others[name], values)
        embeds = self._image_rows.rows(0, images * self._config.cameras.tokens)
        dims = {"I": embeds.shape[0], "L": len(token_ids), "S": rows}
        outputs = {
            name: buffer.view(*(dims[dim] if isinstance(dim, str) else dim for dim in shape))
            for name, buffer in self._outputs.items()
            for shape in [self._prefix.bindings[name].shape]
        }
        bindings = self._prefix.bindings
        own, passed = (
            {name: tensor for name, tensor in self._others.items() if (name in bindings) == inside}
            for inside in (True, False)
        )
        self._run(self._prefix, dims, {IMAGE_EMBEDS: embeds, TOKEN_IDS: tokens, **own, **outputs})
        return PrefixContext(outputs | passed, rows)

    def _size(self, shape: Sequence[int | str]) -> int:
        return prod(self._config.max_prefix_rows if isinstance(dim, str) else dim for dim in shape)

    def _run(self, engine: EngineExecutor, dims: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Queue a run, and record it if its tensors are those of an earlier run."""
        engine.prepare(0, dims, tensors, self._device.stream)
        engine.execute(self._device.stream)
        engine.record_repeated(self._device.stream)
