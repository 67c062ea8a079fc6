# SPDX-License-Identifier: Apache-2.0
"""The head of Diffusion Policy.

A U-Net takes noise away from actions, by a condition that the observations give.

Source of the model: LeRobot 0.4.4, policies/diffusion.
"""

from __future__ import annotations

from edgellm_ros.diffusion.action_head import BoundContext, PrefixContext
from edgellm_ros.diffusion.affine_space import AffineActionSpace
from edgellm_ros.diffusion.diffusion_policy_config import DiffusionConfig
from edgellm_ros.diffusion.samplers import NoiseSchedule


class DiffusionHead:
    """An `ActionHead` whose context is a `PrefixContext`: the condition."""

    def __init__(self, config: DiffusionConfig) -> None:
        self.config = config
        self.sampler = NoiseSchedule(config.schedule)
        self.space = AffineActionSpace(config.action_space)
        self.shape = config.model_horizon, config.action_space.model_dim

    def bind(self, context: PrefixContext) -> BoundContext:
        return BoundContext(dict(context.tensors), dict(context.dims))
