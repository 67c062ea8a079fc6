# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H, text only.

Its layers are Mamba2, attention without positions, and feed-forward blocks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection
from edgellm_ros.builder.claimed_sizes import check_dimensions
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.nemotron_h.config import MODEL_TYPE, architecture
from edgellm_ros.builder.families.nemotron_h.text import build_llm
from edgellm_ros.builder.families.nemotron_h.text_cuda import build_cuda_llm
from edgellm_ros.builder.lm_head import find_lm_head
from edgellm_ros.builder.model import Model
from edgellm_ros.builder.recurrent_cuda import has_kernels
from edgellm_ros.builder.vocabulary import read_generation_config, special_tokens, stop_token_ids


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint of Nemotron-H; see `Family`."""
    generation = read_generation_config(checkpoint)
    prefix = "backbone" if weights.has_module("backbone") else "model"
    check_dimensions(config, weights)  # the layers are a list, as long as the file has it
    hybrid = architecture(config, prefix)
    return Model(
        llm=hybrid.runner,
        embedding=hybrid.embedding,
        lm_head=find_lm_head(weights, hybrid.embedding, config.flag("tie_word_embeddings", False)),
        special_tokens=special_tokens(config, config, generation),
        stop_token_ids=stop_token_ids(config, generation),
        build_llm=partial(build_llm, hybrid, weights),
        build_cuda_llm=partial(build_cuda_llm, hybrid, weights) if has_kernels(hybrid.runner) else None,
        verifies_drafts=True,
    )


FAMILY = Family("nemotron_h", (MODEL_TYPE,), read)
