# SPDX-License-Identifier: Apache-2.0
"""CameraEngine: an engine of images and the robot's state.

Images have the size that the policy was trained with, which may be another for each camera.
Policies with such an engine take no text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from edgellm_ros.diffusion.policy_config import FixedCameraConfig, PolicyConfig
from edgellm_ros.echo import quoted
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.binding_names import STATE, camera_image
from edgellm_ros.runtime.metrics import MultimodalMetrics
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest

logger = logging.getLogger(__name__)


class CameraEngine:
    """Checks requests, and runs the engine on their inputs; all sizes are fixed."""

    def __init__(self, opening: Opening, part: str, config: PolicyConfig, cameras: FixedCameraConfig) -> None:
        self._config, self._cameras = config, cameras
        self._device = opening.device
        self._engine = opening.policy_engine(part)
        self.tensors: dict[str, Tensor] = {
            name: self._device.empty(tuple(map(int, binding.shape)), binding.dtype)
            for name, binding in self._engine.bindings.items()
        }
        self._told = False  # whether the log says that a prompt is not used

    def tell_unused(self, request: LLMGenerationRequest) -> None:
        """Log, once, that a prompt is not used."""
        if request.prompt and not self._told:
            self._told = True
            task = quoted(request.prompt)
            logger.warning("%s takes no text: the task %s is not used", self._config.kind, task)

    def check(self, images: Sequence[np.ndarray]) -> None:
        """Raise ValueError unless there is an image of each camera, in its size."""
        cameras = self._cameras
        if len(images) != len(cameras.names):
            raise ValueError(
                f"the request has {len(images)} images; {self._config.kind} needs one of each camera: "
                f"{', '.join(cameras.names)}"
            )
        sizes = zip(cameras.names, cameras.heights, cameras.widths, images, strict=True)
        for name, height, width, image in sizes:
            found = image.shape[-3:-1]  # [H,W,3], or [O,H,W,3] of several times
            if found != (height, width):
                raise ValueError(
                    f"camera {name}: the image has {found[0]}x{found[1]} pixels, "
                    f"the policy was trained with {height}x{width} (height x width)"
                )

    def run(self, sequence: PolicySequence, metrics: MultimodalMetrics) -> None:
        """Queue the engine for a sequence; `tensors` get its outputs."""
        device = self._device
        for i, image in enumerate(sequence.images):
            tensor = self.tensors[camera_image(i)]
            device.upload(tensor, np.ascontiguousarray(image).reshape(tensor.shape))
        if sequence.state is not None:
            device.upload(self.tensors[STATE], sequence.state)
        self._engine.prepare(0, {}, self.tensors, device.stream)
        self._engine.execute(device.stream)
        self._engine.record_repeated(device.stream)
        metrics.total_images += len(sequence.images) * self._config.observation_steps
