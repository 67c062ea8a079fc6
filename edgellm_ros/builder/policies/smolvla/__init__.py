# SPDX-License-Identifier: Apache-2.0
"""SmolVLA as LeRobot saves it.

The model has SmolVLM's vision tower and first layers, and an action expert.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE
from edgellm_ros.builder.policies import LargeLayers, Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.smolvla.architecture import CONNECTOR, EMBEDDING, EXPERT, TEXT_MODEL, VLM
from edgellm_ros.builder.policies.smolvla.config import read_architecture, read_policy
from edgellm_ros.builder.policies.smolvla.expert import build_expert
from edgellm_ros.builder.policies.smolvla.prefix import build_prefix
from edgellm_ros.builder.policies.smolvla.vision import build_vision
from edgellm_ros.builder.policies.tokenizer import tokens_around
from edgellm_ros.builder.policies.vlm import find_vlm
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.files import PREFIX


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint; see `Policy`."""
    files = "config.json", TOKENIZER_FILE
    folder = find_vlm(checkpoint, config.text("vlm_model_name"), sources.vlm, files, "a SmolVLA")
    architecture = read_architecture(config, read_section(folder / "config.json"), weights)
    for name in (EMBEDDING, f"{CONNECTOR}.proj.weight"):
        # the rows that enter the prefix
        weights.multiply(name, np.array([architecture.llm.hidden_size], np.float32) ** 0.5)
    tokenizer = folder / TOKENIZER_FILE
    around = tokens_around(tokenizer, architecture.llm.vocab_size)
    policy = read_policy(checkpoint, config, architecture, weights, around, sources.dataset)
    return PolicyModel(
        policy,
        architecture.llm,
        tokenizer.read_bytes(),
        {
            "visual": partial(build_vision, architecture, weights),
            PREFIX: partial(build_prefix, architecture, weights),
            "action": partial(build_expert, architecture, weights),
        },
        {"visual": partial(build_vision, architecture, weights, cuda=True)},
        LargeLayers(weights, (TEXT_MODEL, f"{VLM}.vision_model.encoder", CONNECTOR, EXPERT)),
    )


POLICY = Policy("smolvla", read)
