# SPDX-License-Identifier: Apache-2.0
"""Chooses a policy's action space, and the reference of its relative actions."""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.affine_space import ActionReference, AffineActionSpace, TipActionSpace
from edgellm_ros.diffusion.groot_config import GrootSpaceConfig
from edgellm_ros.diffusion.groot_space import GrootActionSpace, PoseReference
from edgellm_ros.diffusion.policy_config import AffineSpaceConfig, TipSpaceConfig


def make_action_space(config: AffineSpaceConfig) -> AffineActionSpace:
    """Make the action space of a policy."""
    if isinstance(config, GrootSpaceConfig):
        return GrootActionSpace(config)
    return TipActionSpace(config) if isinstance(config, TipSpaceConfig) else AffineActionSpace(config)


def make_reference(state: np.ndarray | None, config: AffineSpaceConfig) -> ActionReference:
    """Make the `ActionReference` of a plan from a state [D]."""
    if isinstance(config, GrootSpaceConfig) and state is not None:
        return PoseReference(state, config)
    return ActionReference(state, config)
