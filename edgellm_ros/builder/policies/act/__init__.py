# SPDX-License-Identifier: Apache-2.0
"""ACT as LeRobot saves it.

A ResNet, an encoder and a decoder compute actions of images and state.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies import Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.act.config import read_architecture, read_policy
from edgellm_ros.builder.policies.act.graph import build_act
from edgellm_ros.builder.weights.weights import Weights

logger = logging.getLogger(__name__)


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint; see `Policy`."""
    if sources.vlm is not None:
        raise config.fail("type", "a policy without a vision language model (--vlm)")
    architecture = read_architecture(checkpoint, config, weights)
    if config.given("temporal_ensemble_coeff"):
        coeff = config.number("temporal_ensemble_coeff")
        logger.warning(
            "%s: temporal_ensemble_coeff %g is not part of the engine: set temporal_ensembling and "
            "temporal_ensemble_coeff of edgellm_arm",
            config.where,
            coeff,
        )
    policy = read_policy(checkpoint, config, architecture, weights, sources.dataset)
    return PolicyModel(policy, None, None, {"action": partial(build_act, architecture, weights)})


POLICY = Policy("act", read)
