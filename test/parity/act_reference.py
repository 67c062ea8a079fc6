# SPDX-License-Identifier: Apache-2.0
"""ACT with random weights, as LeRobot computes and saves it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import lerobot_policies
import numpy as np
import torch
from camera_policy import CameraPolicy
from policy_shapes import ACT_SHAPES, PolicyShape
from recorded_policies import CHECKPOINT, Answer, frames_of, write_answers

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


def record_act(name: str, folder: Path, observations: int = 2) -> None:
    """Save an ACT of ACT_SHAPES, and LeRobot's actions for one or two observations."""
    shape, seed = ACT_SHAPES[name], list(ACT_SHAPES).index(name)
    reference = ACTReference(shape, seed)
    reference.save(folder / CHECKPOINT)
    rng, answers = np.random.default_rng(seed), []
    state, environment = (rng.normal(size=n).astype(np.float32) for n in (shape.state, shape.environment))
    for frames in frames_of(shape.cameras, seed)[:observations]:
        actions = reference.actions(reference.batch(state, environment, frames))
        answers.append(Answer(frames, np.concatenate([state, environment]), actions[None]))
    write_answers(folder, answers)
