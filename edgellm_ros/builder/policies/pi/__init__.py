# SPDX-License-Identifier: Apache-2.0
"""pi0 and pi0.5 as LeRobot saves them, or openpi for PyTorch.

The models have PaliGemma's vision tower and language model, and an action expert with Gemma's layers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.known_policies import OPENPI
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE
from edgellm_ros.builder.policies import LargeLayers, Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.pi.architecture import EXPERT, PROJECTOR, TEXT, TOWER
from edgellm_ros.builder.policies.pi.config import read_architecture, read_policy
from edgellm_ros.builder.policies.pi.expert import build_expert
from edgellm_ros.builder.policies.pi.modulation import build_modulation
from edgellm_ros.builder.policies.pi.openpi import (
    as_lerobot,
    is_adaptive,
    read_description,
    read_openpi_policy,
)
from edgellm_ros.builder.policies.pi.prefix import build_prefix
from edgellm_ros.builder.policies.pi.tensors import canonical_weights
from edgellm_ros.builder.policies.pi.version import find_version
from edgellm_ros.builder.policies.pi.vision import build_vision
from edgellm_ros.builder.policies.tokenizer import tokens_around
from edgellm_ros.builder.policies.vlm import find_vlm
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.files import MODULATION, PREFIX

PALIGEMMA = "google/paligemma-3b-pt-224"
IMAGE_TOKEN = "<image>"  # of PaliGemma's tokenizer, beyond the embeddings of these models


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint of LeRobot, or of openpi, which has no `type`; see `Policy`."""
    own = config.has("type")
    adaptive = config.text("type") == "pi05" if own else is_adaptive(weights)
    named = canonical_weights(weights, adaptive)
    if own:
        architecture = read_architecture(config, named)
        version = find_version(checkpoint, config, sources.lerobot)
    else:
        description = _read_openpi(checkpoint, config, sources)
        architecture = read_architecture(as_lerobot(config, description, adaptive), named)
    files = (TOKENIZER_FILE,)
    vlm = find_vlm(checkpoint, PALIGEMMA, sources.vlm, files, "a pi0 or pi0.5")
    tokenizer = vlm / TOKENIZER_FILE
    around = tokens_around(tokenizer, architecture.llm.vocab_size, (IMAGE_TOKEN,))
    policy = (
        read_policy(checkpoint, config, architecture, weights, around, (sources.dataset, version))
        if own
        else read_openpi_policy(checkpoint, description, architecture, around)
    )
    return PolicyModel(
        policy,
        architecture.llm,
        tokenizer.read_bytes(),
        {
            "visual": partial(build_vision, architecture, named),
            PREFIX: partial(build_prefix, architecture, named),
            "action": partial(build_expert, architecture, named),
        },
        {
            "visual": partial(build_vision, architecture, named, cuda=True),
            PREFIX: partial(build_prefix, architecture, named, cuda=True),
            "action": partial(build_expert, architecture, named, cuda=True),
        },
        LargeLayers(named, (TEXT, f"{TOWER}.encoder", PROJECTOR, EXPERT)),
        cuda_only={MODULATION: partial(build_modulation, architecture, named)} if adaptive else {},
    )


def _read_openpi(checkpoint: Path, config: ConfigSection, sources: PolicySources) -> ConfigSection:
    """Read what describes a folder of openpi; options of LeRobot's are refused."""
    for name in ("dataset", "lerobot"):
        if getattr(sources, name) is not None:
            raise config.fail(OPENPI, f"a checkpoint of openpi, but --{name} is for those of LeRobot")
    return read_description(checkpoint)


POLICY = Policy("pi0", read, more=("pi05",), lerobot=True)
