# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5, text: layers of the gated delta net, and gated attention in every fourth layer.

A checkpoint with a vision tower is refused: the tower is not supported yet.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.qwen3_5.config import text_architecture
from edgellm_ros.builder.families.qwen3_5.text import build_llm
from edgellm_ros.builder.families.qwen3_5.text_cuda import build_cuda_llm
from edgellm_ros.builder.lm_head import find_lm_head
from edgellm_ros.builder.model import Model
from edgellm_ros.builder.recurrent_cuda import has_kernels
from edgellm_ros.builder.vocabulary import read_generation_config, special_tokens, stop_token_ids

TEXT_MODEL = "qwen3_5_text"
WITH_VISION = "qwen3_5"


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint of Qwen3.5; see `Family`."""
    generation = read_generation_config(checkpoint)
    text, prefix = config, "model"
    if config.has("vision_config"):
        raise ValueError(
            f"{config.where}: vision_config: the vision tower of Qwen3.5 is not supported; "
            "without this key the language model is exported alone"
        )
    if config.data["model_type"] == WITH_VISION:
        text, prefix = config.section("text_config"), "model.language_model"
    architecture = text_architecture(text, prefix)
    runner = architecture.runner
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    return Model(
        llm=runner,
        embedding=architecture.embedding,
        lm_head=find_lm_head(weights, architecture.embedding, tied),
        special_tokens=special_tokens(text, text, generation),
        stop_token_ids=stop_token_ids(text, generation),
        build_llm=partial(build_llm, architecture, weights),
        build_cuda_llm=partial(build_cuda_llm, architecture, weights) if has_kernels(runner) else None,
    )


FAMILY = Family("qwen3_5", (TEXT_MODEL, WITH_VISION), read)
