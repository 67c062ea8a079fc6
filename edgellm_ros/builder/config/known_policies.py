# SPDX-License-Identifier: Apache-2.0
"""Recognises policies that are not supported, to name them in errors."""

from __future__ import annotations

import re
from pathlib import Path

# `type` of LeRobot's config.json, or `model_type` of others, in small letters and digits -> what it is.
POLICIES = {
    "multitaskdit": "a diffusion transformer for several tasks",
    "vqbet": "VQ-BeT, a behaviour transformer",
    "tdmpc": "TD-MPC, a world model",
    "sac": "SAC, a policy of reinforcement learning",
    "rewardclassifier": "a reward model, which answers without actions",
    "sarm": "SARM, a reward model, which answers without actions",
    "robometer": "Robometer, a reward model, which answers without actions",
    "topreward": "TOPReward, a reward model, which answers without actions",
    "gaussianactor": "an actor of reinforcement learning",
    "pi0fast": "pi0-FAST, which writes actions as tokens of PaliGemma",
    "gr00tn1": "GR00T N1, a diffusion transformer on Eagle",
    "gr00tn15": "GR00T N1.5, a diffusion transformer on Eagle",
    "gr00tn1d5": "GR00T N1.5, a diffusion transformer on Eagle",
    "openvla": "OpenVLA, which writes actions as tokens of Llama 2",
    "xvla": "X-VLA, in another layout than that of LeRobot",
    "wallx": "WALL-X, a flow policy on Qwen2.5-VL",
    "molmoact": "MolmoAct, which writes actions as tokens of Molmo",
    "molmoact2": "MolmoAct 2, a flow policy on Molmo",
    "eo1": "EO-1, a flow policy on Qwen2.5-VL",
    "evo1": "Evo-1, a flow policy on InternVL3",
    "fastwam": "FastWAM, a world model with actions",
    "lingbotva": "LingBot-VA, a world model with actions",
    "vlajepa": "VLA-JEPA, a vision language action model",
}
SUPPORTED = "ACT, Diffusion Policy, GR00T N1.6 and N1.7, pi0, pi0.5, SmolVLA and X-VLA"
OPENPI = "paligemma_variant"  # a key of openpi's config.json, which has no type


def check_folder(checkpoint: Path) -> None:
    """Raise ValueError for a folder of weights that JAX has saved."""
    if (checkpoint / "params").is_dir() and not (checkpoint / "config.json").is_file():
        raise ValueError(
            f"{checkpoint}: a checkpoint of openpi for JAX: convert it with openpi's "
            "examples/convert_jax_model_to_pytorch.py"
        )


def is_policy(name: object) -> bool:
    """Tell whether a type is that of a known policy."""
    return isinstance(name, str) and _letters(name) in POLICIES


def hint(name: str) -> str:
    """Say what a policy is and which one is supported.

    The hint is "" for a type that is not known.
    """
    title = POLICIES.get(_letters(name))
    supported = f"of policies, {SUPPORTED} are supported (docs/policies.md)"
    return f"; this is {title}; {supported}" if title else ""


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
