# SPDX-License-Identifier: Apache-2.0
"""What the layouts of GR00T's checkpoints have in common."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.groot.embodiment import Embodiment
from edgellm_ros.builder.policies.groot.version import Version
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.multimodal.image_crop import ImageCrop


@dataclass(frozen=True)
class Source:
    """A checkpoint as one of the layouts has it."""

    version: Version
    model: ConfigSection  # sizes of the model
    weights: Weights  # with the names of NVIDIA's layout
    embodiment: Embodiment
    cameras: tuple[str, ...]  # in the order in which the model takes them
    frames: int  # images of each camera in the prompt, by time
    crop: ImageCrop
    plain_words: bool  # whether a task is in small letters, without punctuation
    denoise_steps: int
    named: bool  # whether a data set may name the values of state and actions
