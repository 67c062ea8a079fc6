# SPDX-License-Identifier: Apache-2.0
"""DirectEngine: one engine from images and state to actions, as that of ACT."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from edgellm_ros.diffusion.policy_config import ACTConfig
from edgellm_ros.echo import quoted
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.binding_names import ACTIONS, STATE, camera_image
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest

logger = logging.getLogger(__name__)


class DirectEngine:
    """An engine without text, noise and steps; see `PolicyEngines`."""

    def __init__(self, opening: Opening, config: ACTConfig, metrics: RuntimeMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._device = opening.device
        self._engine = opening.policy_engine("action")
        self._tensors: dict[str, Tensor] = {
            name: self._device.empty(tuple(map(int, binding.shape)), binding.dtype)
            for name, binding in self._engine.bindings.items()
        }
        self._told = False  # whether the log says that a prompt is not used

    def tokens(self, request: LLMGenerationRequest, state: np.ndarray | None) -> list[int]:
        kind = self._config.kind
        if request.denoise_steps is not None:
            raise ValueError(f"denoise_steps is {request.denoise_steps}, but {kind} has no Euler steps")
        if request.prompt and not self._told:
            self._told = True
            logger.warning("%s takes no text: the task %s is not used", kind, quoted(request.prompt))
        return []

    def rows(self, images: Sequence[np.ndarray], tokens: int) -> int:
        cameras = self._config.cameras
        if len(images) != len(cameras.names):
            raise ValueError(
                f"the request has {len(images)} images; {self._config.kind} needs one of each camera: "
                f"{', '.join(cameras.names)}"
            )
        sizes = zip(cameras.names, cameras.heights, cameras.widths, images, strict=True)
        for name, height, width, image in sizes:
            if image.shape[:2] != (height, width):
                raise ValueError(
                    f"camera {name}: the image has {image.shape[0]}x{image.shape[1]} pixels, "
                    f"the policy was trained with {height}x{width} (height x width)"
                )
        return self._config.max_prefix_rows

    def compute(self, sequence: PolicySequence, clock: StageClock) -> np.ndarray | None:
        if not sequence.report("action", 0):
            return None
        device, metrics, cameras = self._device, self._metrics, self._config.cameras
        for i, image in enumerate(sequence.images):
            device.upload(self._tensors[camera_image(i)], np.ascontiguousarray(image))
        if sequence.state is not None:
            device.upload(self._tensors[STATE], sequence.state)
        self._engine.prepare(0, {}, self._tensors, device.stream)
        self._engine.execute(device.stream)
        self._engine.record_repeated(device.stream)
        values = device.copy_to_host(self._tensors[ACTIONS]).wait()
        if not np.isfinite(values).all():
            raise EngineError("the actions are not finite")
        metrics.multimodal.total_images += len(sequence.images)
        metrics.multimodal.total_image_tokens += sum(cameras.tokens)
        metrics.action.total_runs += 1
        clock.end("action_s")
        return values[None]
