# SPDX-License-Identifier: Apache-2.0
"""The head of X-VLA.

A transformer over the noisy actions and the prefix predicts the clean actions.

Source of the model: LeRobot 0.6.1, policies/xvla.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgellm_ros.diffusion.action_head import BoundContext, PrefixContext
from edgellm_ros.diffusion.affine_space import TipActionSpace
from edgellm_ros.diffusion.policy_config import XVLAConfig
from edgellm_ros.diffusion.samplers import StartNoise


class XVLAHead:
    """X-VLA with one configuration; see `PolicyHead`."""

    sampler = StartNoise()

    def __init__(self, config: XVLAConfig) -> None:
        self.config = config
        self.space = TipActionSpace(config.action_space)
        self.shape = config.action_space.horizon, config.action_space.model_dim

    def bind(self, context: PrefixContext) -> BoundContext:
        return BoundContext(dict(context.tensors), dict(context.dims))

    def prompt(self, task: str, state: np.ndarray) -> str:
        return task

    def prefix_rows(self, images: int, tokens: int) -> int:
        return images + self.config.max_prompt_tokens  # filled up

    def prefix_inputs(self, state: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"state": state}
