# SPDX-License-Identifier: Apache-2.0
"""Diffusion Policy as LeRobot saves it.

Encoders of images make a condition of the last observations, and a U-Net takes noise away from actions.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies import Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.diffusion.config import read_architecture, read_policy
from edgellm_ros.builder.policies.diffusion.encoder import build_encoder
from edgellm_ros.builder.policies.diffusion.unet import build_unet
from edgellm_ros.builder.weights.weights import Weights


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint; see `Policy`."""
    if sources.vlm is not None:
        raise config.fail("type", "a policy without a vision language model (--vlm)")
    architecture = read_architecture(checkpoint, config, weights)
    policy = read_policy(checkpoint, config, architecture, weights, sources.dataset)
    parts = {
        "prefix": partial(build_encoder, architecture, weights),
        "action": partial(build_unet, architecture, weights),
    }
    return PolicyModel(policy, None, None, parts)


POLICY = Policy("diffusion", read)
