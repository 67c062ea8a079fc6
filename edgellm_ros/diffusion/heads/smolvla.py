# SPDX-License-Identifier: Apache-2.0
"""The head of SmolVLA.

The actions attend to keys and values of a prefix of images, task and state.

Source of the model: LeRobot 0.4.4, policies/smolvla.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgellm_ros.diffusion.action_head import BoundContext, PrefixContext
from edgellm_ros.diffusion.affine_space import AffineActionSpace
from edgellm_ros.diffusion.heads.prompt_text import line
from edgellm_ros.diffusion.policy_config import SmolVLAConfig
from edgellm_ros.diffusion.samplers import NOISE_AT_1


class SmolVLAHead:
    """SmolVLA with one configuration; see `PolicyHead`."""

    sampler = NOISE_AT_1

    def __init__(self, config: SmolVLAConfig) -> None:
        self.config = config
        self.space = AffineActionSpace(config.action_space)
        self.shape = config.action_space.horizon, config.action_space.model_dim

    def bind(self, context: PrefixContext) -> BoundContext:
        return BoundContext(dict(context.tensors), dict(context.dims))

    def prompt(self, task: str, state: np.ndarray) -> str:
        return line(task)

    def prefix_rows(self, images: int, tokens: int) -> int:
        return images + tokens + 1

    def prefix_inputs(self, state: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"state": state}
