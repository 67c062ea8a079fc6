# SPDX-License-Identifier: Apache-2.0
"""X-VLA as LeRobot saves it.

The model has Florence-2's vision tower and text encoder, and a transformer over images, task, soft prompts
and actions. Some of its weights, and the soft prompts, are those of one domain.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE, read_tokenizer, template_tokens
from edgellm_ros.builder.policies import LargeLayers, Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.statistics import Normalisation
from edgellm_ros.builder.policies.tokenizer import tokens_around
from edgellm_ros.builder.policies.vlm import find_vlm
from edgellm_ros.builder.policies.xvla.architecture import ENCODER, HEAD
from edgellm_ros.builder.policies.xvla.config import read_architecture, read_policy
from edgellm_ros.builder.policies.xvla.davit import build_vision
from edgellm_ros.builder.policies.xvla.florence import canonical_weights, is_older
from edgellm_ros.builder.policies.xvla.prefix import build_prefix
from edgellm_ros.builder.policies.xvla.steps import read_xvla_steps
from edgellm_ros.builder.policies.xvla.transformer import build_transformer
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.files import PREFIX

BART = "facebook/bart-large"  # whose tokenizer is the default
PADDING = "<pad>"  # of BART's tokenizer, unless its configuration names another token


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint; see `Policy`."""
    named = canonical_weights(weights)
    architecture = read_architecture(config, named, is_older(weights))
    steps = read_xvla_steps(checkpoint, config, architecture.domains)
    name = config.text("tokenizer_name") if config.has("tokenizer_name") else BART
    folder = find_vlm(checkpoint, name, sources.vlm, (TOKENIZER_FILE,), "an X-VLA")
    tokenizer = folder / TOKENIZER_FILE
    around = tokens_around(tokenizer, architecture.text.vocab_size)
    text = dataclasses.replace(architecture.text, pad_token=_padding_token(folder))
    architecture = dataclasses.replace(architecture, text=text, domain=steps.domain)
    normalisation = Normalisation(checkpoint, config, weights, sources.dataset)
    return PolicyModel(
        read_policy(checkpoint, config, architecture, steps, around, normalisation),
        None,
        tokenizer.read_bytes(),
        {
            "visual": partial(build_vision, architecture, named),
            PREFIX: partial(build_prefix, architecture, named),
            "action": partial(build_transformer, architecture, named),
        },
        layers=LargeLayers(named, (f"{ENCODER}.layers", f"{ENCODER}.embed_tokens", f"{HEAD}.blocks")),
    )


def _padding_token(folder: Path) -> int:
    """Find the id of the token that fills up a task.

    ValueError if the tokenizer has none.
    """
    name = template_tokens(folder).get("pad_token", PADDING)
    token = read_tokenizer(folder / TOKENIZER_FILE).token_to_id(name)
    if token is None:
        raise ValueError(f"{folder / TOKENIZER_FILE}: no token {quoted(name)}, which fills up a task")
    return token


POLICY = Policy("xvla", read)
