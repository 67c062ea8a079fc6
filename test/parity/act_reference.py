# SPDX-License-Identifier: Apache-2.0
"""ACT with random weights, as LeRobot computes and saves it."""

from __future__ import annotations

import dataclasses

import lerobot_policies
import numpy as np
import torch
from camera_policy import CameraPolicy, PolicyShape

SMALL = {
    "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "n_encoder_layers": 2, "n_vae_encoder_layers": 1,
    "chunk_size": 7, "n_action_steps": 7, "latent_dim": 4,
}  # fmt: skip


class ACTReference(CameraPolicy):
    """LeRobot's ACT; SMALL, if its shape has no other sizes."""

    def __init__(self, shape: PolicyShape, seed: int) -> None:
        modeling, processors = lerobot_policies.act()
        from lerobot.policies.act.configuration_act import ACTConfig

        super().__init__(
            dataclasses.replace(shape, policy={**SMALL, **shape.policy}),
            seed,
            config=ACTConfig,
            policy=modeling.ACTPolicy,
            processors=processors.make_act_pre_post_processors,
            ways={"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        )

    def actions(self, batch: dict) -> np.ndarray:
        """Compute physical actions [T, actions]."""
        with torch.inference_mode():
            return self.after(self.policy.predict_action_chunk(batch))[0].numpy()
