# SPDX-License-Identifier: Apache-2.0
"""Diffusion Policy with random weights, as LeRobot computes and saves it."""

from __future__ import annotations

import dataclasses

import lerobot_policies
import numpy as np
import torch
from camera_policy import CameraPolicy
from policy_shapes import PolicyShape

SMALL = {
    "horizon": 8, "n_action_steps": 4, "down_dims": (16, 24), "kernel_size": 3,
    "diffusion_step_embed_dim": 16, "spatial_softmax_num_keypoints": 6, "num_train_timesteps": 30,
}  # fmt: skip


class DiffusionReference(CameraPolicy):
    """LeRobot's Diffusion Policy; SMALL, if its shape has no other sizes."""

    def __init__(self, shape: PolicyShape, seed: int) -> None:
        self._modeling, processors = lerobot_policies.diffusion()
        from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

        super().__init__(
            dataclasses.replace(shape, policy={**SMALL, **shape.policy}),
            seed,
            config=DiffusionConfig,
            policy=self._modeling.DiffusionPolicy,
            processors=processors.make_diffusion_pre_post_processors,
            ways={"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
        )

    def action(self, batch: dict, noise: np.ndarray, monkeypatch) -> np.ndarray:
        """Compute the next physical action [actions].

        A plan is made if all actions of the last one have been taken.

        noise [1 + S, T, actions]: of a plan, that of its start and those that S of its steps add.
        """
        added = iter(torch.tensor(noise[1:, None]))
        of_steps = self._modeling.DDPMScheduler.step.__globals__
        monkeypatch.setitem(of_steps, "randn_tensor", lambda *shape, **options: next(added))
        with torch.inference_mode():
            chosen = self.policy.select_action(batch, noise=torch.tensor(noise[None, 0]))
            return self.after(chosen)[0].numpy()
