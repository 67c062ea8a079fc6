# SPDX-License-Identifier: Apache-2.0
"""pi0 and pi0.5 as LeRobot saves them.

The models have PaliGemma's vision tower and language model, and an action expert with Gemma's layers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE
from edgellm_ros.builder.policies import Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.pi.config import read_architecture, read_policy
from edgellm_ros.builder.policies.pi.expert import build_expert
from edgellm_ros.builder.policies.pi.prefix import build_prefix
from edgellm_ros.builder.policies.pi.tensors import canonical_weights
from edgellm_ros.builder.policies.pi.version import find_version
from edgellm_ros.builder.policies.pi.vision import build_vision
from edgellm_ros.builder.policies.tokenizer import tokens_around
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.files import PREFIX

VLM_FOLDER = "vlm"  # of a checkpoint: the tokenizer of PaliGemma
PALIGEMMA = "google/paligemma-3b-pt-224"
IMAGE_TOKEN = "<image>"  # of PaliGemma's tokenizer, beyond the embeddings of these models


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint; see `Policy`."""
    named = canonical_weights(weights, config.text("type") == "pi05")
    architecture = read_architecture(config, named)
    version = find_version(checkpoint, config, sources.lerobot)
    tokenizer = _find_tokenizer(checkpoint, sources.vlm)
    around = tokens_around(tokenizer, architecture.llm.vocab_size, (IMAGE_TOKEN,))
    policy = read_policy(checkpoint, config, architecture, weights, around, (sources.dataset, version))
    return PolicyModel(
        policy,
        architecture.llm,
        tokenizer,
        {
            "visual": partial(build_vision, architecture, named),
            PREFIX: partial(build_prefix, architecture, named),
            "action": partial(build_expert, architecture, named),
        },
    )


def _find_tokenizer(checkpoint: Path, given: Path | None) -> Path:
    """Find PaliGemma's tokenizer in the folder `given`, or `vlm` of the checkpoint.

    FileNotFoundError tells where to get it.
    """
    folder = checkpoint / VLM_FOLDER if given is None else given
    if not (folder / TOKENIZER_FILE).is_file():
        raise FileNotFoundError(
            f"{folder / TOKENIZER_FILE} not found: the policy needs the tokenizer of PaliGemma: hf download "
            f"{PALIGEMMA} {TOKENIZER_FILE} --local-dir {checkpoint / VLM_FOLDER}, or name its folder (--vlm)"
        )
    return folder / TOKENIZER_FILE


POLICY = Policy("pi0", read, more=("pi05",), lerobot=True)
