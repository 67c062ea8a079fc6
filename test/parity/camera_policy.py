# SPDX-License-Identifier: Apache-2.0
"""A policy of cameras and state with random weights, as LeRobot computes it.

LeRobot saves it too. These are ACT and Diffusion Policy, which take no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from policy_shapes import PolicyShape

STATE, ENVIRONMENT = "observation.state", "observation.environment_state"


class CameraPolicy:
    """LeRobot's policy and processors with random weights."""

    def __init__(
        self,
        shape: PolicyShape,
        seed: int,
        *,
        config: Callable[..., Any],
        policy: Callable[..., Any],
        processors: Callable[..., Any],
        ways: Mapping[str, str],
    ) -> None:
        """Make the policy by LeRobot's classes of its configuration and itself.

        processors: LeRobot's function that makes both; ways: of normalisation, if the shape has no other.
        """
        from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature

        self.shape = shape
        torch.manual_seed(seed)
        inputs = {
            f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, *size))
            for name, size in shape.cameras.items()
        }
        if shape.state:
            inputs[STATE] = PolicyFeature(FeatureType.STATE, (shape.state,))
        if shape.environment:
            inputs[ENVIRONMENT] = PolicyFeature(FeatureType.ENV, (shape.environment,))
        if shape.efforts:
            inputs["observation.effort"] = PolicyFeature(FeatureType.STATE, (shape.efforts,))
        chosen = dict(ways) | dict(shape.ways)
        self.config = config(
            input_features=inputs,
            output_features={"action": PolicyFeature(FeatureType.ACTION, (shape.actions,))},
            normalization_mapping={kind: NormalizationMode(way) for kind, way in chosen.items()},
            pretrained_backbone_weights=None,
            device="cpu",
            **shape.policy,
        )
        self.policy = policy(self.config).eval().float()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            tensors = [*self.policy.named_parameters(), *self.policy.named_buffers()]
            for name, tensor in tensors:
                if tensor.ndim != 1:
                    continue
                values = torch.randn(tensor.shape, generator=generator) * 0.1
                is_factor = tensor.min() == 1  # of a norm, or a variance
                tensor.copy_(values.abs() + 0.7 if "running_var" in name else values + float(is_factor))
        rng = np.random.default_rng(seed)
        sizes = {"action": (shape.actions,), STATE: (shape.state,), ENVIRONMENT: (shape.environment,)}
        sizes |= {name: (3, 1, 1) for name in inputs if name.startswith("observation.images.")}
        self.stats = {name: self._stats(rng, size, len(size) == 3) for name, size in sizes.items()}
        self.before, self.after = processors(self.config, self.stats)

    @staticmethod
    def _stats(rng: np.random.Generator, size: tuple[int, ...], image: bool) -> dict[str, torch.Tensor]:
        low, high = ((0.0, 0.2), (0.8, 1.0)) if image else ((-3.0, -1.0), (1.0, 3.0))
        mean, std = ((0.3, 0.6), (0.2, 0.3)) if image else ((-2.0, 2.0), (0.2, 3.0))
        ranges = {"mean": mean, "std": std, "min": low, "max": high, "q01": low, "q99": high}
        return {
            name: torch.tensor(rng.uniform(*range_, size), dtype=torch.float32)
            for name, range_ in ranges.items()
        }

    def save(self, folder: Path) -> Path:
        """Save policy and processors as LeRobot does, and return their folder."""
        for part in (self.policy, self.before, self.after):
            part.save_pretrained(folder)
        return folder

    def batch(self, state: np.ndarray, environment: np.ndarray, frames: Mapping[str, np.ndarray]) -> dict:
        """Make the policy's inputs of frames [H, W, 3] uint8, as LeRobot's processors do."""
        inputs = {
            f"observation.images.{name}": torch.tensor(frame).permute(2, 0, 1).float() / 255
            for name, frame in frames.items()
        }
        # LeRobot reads the device of the state even of a policy that takes none
        inputs[STATE] = torch.tensor(state) if self.shape.state else torch.zeros(1)
        if self.shape.environment:
            inputs[ENVIRONMENT] = torch.tensor(environment)
        return self.before(inputs)
