# SPDX-License-Identifier: Apache-2.0
"""LeRobot's ACT for the second world, from its configuration to its score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

from edgellm_tabletop.episodes.closed_loop import goal_of
from edgellm_tabletop.units import JOINTS
from edgellm_tabletop.world import GOALS, IMAGE_SIZE, Tabletop
from training.arm.demonstrations import CHUNK_SIZE
from training.policy import Batch

STATE, IMAGE, ACTION = "observation.state", "observation.images.front", "action"
EXECUTED = 10  # actions of a chunk, 1 s
Statistics = dict[str, dict[str, Tensor]]
Processors = tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]


def act_config(device: str) -> ACTConfig:
    """Return the configuration: 15 million weights, without the variational encoder."""
    joints = (len(JOINTS),)
    return ACTConfig(
        input_features={
            STATE: PolicyFeature(FeatureType.STATE, joints),
            IMAGE: PolicyFeature(FeatureType.VISUAL, (3, IMAGE_SIZE, IMAGE_SIZE)),
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, joints)},
        chunk_size=CHUNK_SIZE,
        n_action_steps=EXECUTED,
        dim_model=256,
        dim_feedforward=1024,
        use_vae=False,
        pretrained_backbone_weights=None,
        device=device,
    )


def statistics(images: Tensor, states: Tensor, actions: Tensor) -> Statistics:
    """Compute means and standard deviations.

    images [N,H,W,3] uint8, states [N,6], actions [N,C,6]. Those of images are [3,1,1], per channel.
    """
    pixels = images.float().flatten(0, 2) / 255
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
        }
    )


@torch.no_grad()
def calibrate_norms(policy: ACTPolicy, batch: Batch) -> None:
    """Set the statistics of the backbone's frozen batch norms to those of a batch.

    With random weights each residual block would double the variance of its input.
    """

    def measure(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        (x,) = inputs
        norm.running_mean.copy_(x.mean((0, 2, 3)))
        norm.running_var.copy_(x.var((0, 2, 3)))

    norms = [module for module in policy.modules() if isinstance(module, FrozenBatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(measure) for norm in norms]
    policy.forward(batch)
    for hook in hooks:
        hook.remove()


def save_policy(directory: Path, policy: ACTPolicy, processors: Processors) -> None:
    """Write the folder as LeRobot does: configuration, weights in float16, processors."""
    policy.half().save_pretrained(directory)
    for processor in processors:
        processor.save_pretrained(directory)


def load_policy(directory: Path, device: str) -> tuple[ACTPolicy, Processors]:
    """Load a policy and its processors as LeRobot does."""
    policy = ACTPolicy.from_pretrained(directory).to(device).eval()
    overrides = {"device_processor": {"device": device}}
    before = PolicyProcessorPipeline.from_pretrained(
        directory, config_filename="policy_preprocessor.json", overrides=overrides
    )
    after = PolicyProcessorPipeline.from_pretrained(
        directory,
        config_filename="policy_postprocessor.json",
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    return policy, (before, after)


def chunk_maker(policy: ACTPolicy, processors: Processors) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that makes chunks.

    The function takes an image [H,W,3] and a state [6], and returns joint targets [C,6]. LeRobot's own
    inference: preprocessor, `predict_action_chunk`, postprocessor.
    """
    before, after = processors

    @torch.inference_mode()
    def make(image: np.ndarray, state: np.ndarray) -> np.ndarray:
        frame = torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
        observation = before({STATE: torch.from_numpy(state), IMAGE: frame})
        return after(policy.predict_action_chunk(observation))[0].cpu().numpy()

    return make


def play(
    make: Callable[[np.ndarray, np.ndarray], np.ndarray], world: Tabletop, seed: int, delay_steps: int = 0
) -> bool:
    """Play an episode with EXECUTED actions of each chunk.

    The arm holds its last target for `delay_steps` while a chunk is computed. Returns whether the block is
    placed.
    """
    world.reset(seed, goal_of(seed))
    target = world.state
    while not world.ended:
        rows = make(world.image(), world.state)[:EXECUTED]
        for row in [*[target] * delay_steps, *rows]:
            if world.ended:
                break
            target = row
            world.step(target)
    return world.succeeded


def score(
    policy: ACTPolicy, processors: Processors, episodes: int, first_seed: int, delay_steps: int = 0
) -> dict[str, int]:
    """Count the episodes of each goal in which the block is placed.

    The episodes are those of `edgellm evaluate arm` with the same seeds.
    """
    world, make = Tabletop(), chunk_maker(policy, processors)
    placed = dict.fromkeys(GOALS, 0)
    for seed in range(first_seed, first_seed + episodes):
        placed[goal_of(seed)] += play(make, world, seed, delay_steps)
    world.close()
    return placed
