# SPDX-License-Identifier: Apache-2.0
"""LeRobot's ACT for the second world: 15 million weights, no variational encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy, FrozenBatchNorm2d
from lerobot.policies.act.processor_act import make_act_pre_post_processors
from torch import Tensor, nn

from training.arm.kind import Batch, PolicyKind, Processors, Statistics, shared_settings


class Act(PolicyKind):
    """ACT with a ResNet-18."""

    name, rate = "act", 3e-4

    def make(self, device: str, folder: Path) -> ACTPolicy:
        """Make a policy with random weights."""
        config = ACTConfig(
            **shared_settings(device),
            dim_model=256,
            dim_feedforward=1024,
            use_vae=False,
            pretrained_backbone_weights=None,
        )
        return ACTPolicy(config).to(device)

    def processors(self, policy: ACTPolicy, statistics: Statistics) -> Processors:
        """Make LeRobot's processors."""
        return make_act_pre_post_processors(policy.config, statistics)

    def compile(self, policy: ACTPolicy) -> None:
        """Let PyTorch compile the model."""
        policy.model.compile()

    def load(self, folder: Path, config: ACTConfig) -> tuple[ACTPolicy, dict[str, Any]]:
        """Load a policy; its preprocessor stays as it is."""
        return ACTPolicy.from_pretrained(folder, config=config), {}

    @torch.no_grad()
    def begin(self, policy: ACTPolicy, batch: Batch) -> None:
        """Set the statistics of frozen batch norms, and a bias of the decoder.

        The statistics are those of the batch: with random weights and without them, each residual block would
        double the variance of its input. The decoder's first layer attends to zeros: without a bias, the norm
        after it divides by a variance of 0 and multiplies gradients by 316, and the policy learns nothing.
        """
        nn.init.normal_(policy.model.decoder.layers[0].self_attn.out_proj.bias)

        def measure(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            (x,) = inputs
            norm.running_mean.copy_(x.mean((0, 2, 3)))
            norm.running_var.copy_(x.var((0, 2, 3)))

        norms = [module for module in policy.modules() if isinstance(module, FrozenBatchNorm2d)]
        hooks = [norm.register_forward_pre_hook(measure) for norm in norms]
        policy.forward(batch)
        for hook in hooks:
            hook.remove()
