# SPDX-License-Identifier: Apache-2.0
"""What training asks of a policy of LeRobot, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import PolicyProcessorPipeline
from torch import Tensor

from edgellm_tabletop.units import JOINTS
from edgellm_tabletop.world import IMAGE_SIZE
from training.arm.demonstrations import CHUNK_SIZE

STATE, IMAGE, ACTION = "observation.state", "observation.images.front", "action"
EXECUTED = 10  # actions of a chunk, 1 s
MOST_IMAGES = 8192  # of which statistics are computed
Statistics = dict[str, dict[str, Tensor]]
Processors = tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]
Batch = dict[str, Any]  # tensors by name, and the instructions "task"


class PolicyKind(ABC):
    """What differs between the policies: configuration, loss, files, compilation."""

    name: ClassVar[str]  # of LeRobot
    rate: ClassVar[float]  # peak learning rate

    @abstractmethod
    def make(self, device: str, folder: Path) -> PreTrainedPolicy:
        """Make a policy with random weights; folder: where it will be saved."""

    @abstractmethod
    def processors(self, policy: PreTrainedPolicy, statistics: Statistics) -> Processors:
        """Make LeRobot's processors of observations and actions."""

    @abstractmethod
    def compile(self, policy: PreTrainedPolicy) -> None:
        """Let PyTorch compile the model; its weights stay as they are."""

    @abstractmethod
    def load(self, folder: Path, config: PreTrainedConfig) -> tuple[PreTrainedPolicy, dict[str, Any]]:
        """Load a policy with the configuration of its folder.

        Also returns the settings of its preprocessor that change, by the names of steps.
        """

    def begin(self, policy: PreTrainedPolicy, batch: Batch) -> None:  # noqa: B027
        """Prepare a policy for training with its first batch."""

    def loss(self, policy: PreTrainedPolicy, batch: Batch) -> Tensor:
        """Compute LeRobot's loss."""
        return policy.forward(batch)[0]


def shared_settings(device: str) -> dict[str, Any]:
    """Return the settings that all configurations have: features, chunks, device."""
    joints = (len(JOINTS),)
    return {
        "input_features": {
            STATE: PolicyFeature(FeatureType.STATE, joints),
            IMAGE: PolicyFeature(FeatureType.VISUAL, (3, IMAGE_SIZE, IMAGE_SIZE)),
        },
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, joints)},
        "chunk_size": CHUNK_SIZE,
        "n_action_steps": EXECUTED,
        "device": device,
    }


def statistics(images: Tensor, states: Tensor, actions: Tensor) -> Statistics:
    """Compute means and standard deviations.

    images [N,H,W,3] uint8, states [N,6], actions [N,C,6]. Those of images are [3,1,1], per channel, of at
    most MOST_IMAGES: in float32, all would need more memory than a GPU has.
    """
    pixels = images[:: -(-len(images) // MOST_IMAGES)].float().flatten(0, 2) / 255
    return {
        IMAGE: {"mean": pixels.mean(0).view(3, 1, 1).cpu(), "std": pixels.std(0).view(3, 1, 1).cpu()},
        STATE: {"mean": states.mean(0).cpu(), "std": states.std(0).cpu()},
        ACTION: {"mean": actions.flatten(0, 1).mean(0).cpu(), "std": actions.flatten(0, 1).std(0).cpu()},
    }


def lerobot_batch(rows: Batch, processors: Processors) -> Batch:
    """Convert rows of the buffer to what `policy.forward` takes, normalised."""
    before, _ = processors
    return before(
        {
            IMAGE: rows["image"].permute(0, 3, 1, 2).float() / 255,
            STATE: rows["state"],
            ACTION: rows["action"],
            "action_is_pad": rows["is_pad"],
            "task": rows["task"],
        }
    )
